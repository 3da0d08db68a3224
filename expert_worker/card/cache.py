"""Which rows lie in which slot of the card cache. Bookkeeping only: pure, no device.

Keys are (layer, expert), never the expert alone. Replacement: among the WINDOW least recently used rows the one used
least often goes; rows that were looked at and stay lose half their count, so old fame fades.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from evrun.expert_worker.card.slot_table import Key, SlotTable

WINDOW = 16


class CardCache:
    """`slots`: rows that fit the budget; 0 turns the cache off. `table` shows native code where they lie; what it used is taken
    into account by `catch_up`."""

    def __init__(self, slots: int, table: SlotTable) -> None:
        self.slots, self.table = slots, table
        self._free = list(range(slots - 1, -1, -1))
        table.num_free[:] = slots
        self._held: OrderedDict[Key, list[int]] = OrderedDict()
        """Least recently used first: [slot, uses]."""
        self.hits = self.misses = self.evictions = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def catch_up(self) -> list[Key]:
        """Count what native code used as if `find` had been asked for it; to be called before anything else is asked.
        Returns the rows that are not here: they were brought in for one call."""
        return [key for key in self.table.take_used() if self.find(key) is None]

    def find(self, key: Key) -> int | None:
        """The slot of a row that is on the card; counts a hit or a miss, unless the cache is off."""
        if not self.slots:
            return None
        entry = self._held.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        entry[1] += 1
        self._held.move_to_end(key)
        return entry[0]

    def admit(self, key: Key, protected: Container[Key]) -> int | None:
        """A slot for a row that is about to be brought in; None when only `protected` rows could make room."""
        assert key not in self._held
        if not self._free:
            victim = self._victim(protected)
            if victim is None:
                return None
            self.drop(victim)
            self.evictions += 1
        slot = self._free.pop()
        self._held[key] = [slot, 1]
        self.table.put(key, slot)
        return slot

    def drop(self, key: Key) -> None:
        """Forget a row, if it is there."""
        entry = self._held.pop(key, None)
        if entry:
            self._free.append(entry[0])
            self.table.remove(key)

    def _victim(self, protected: Container[Key]) -> Key | None:
        chosen: Key | None = None
        looked = 0
        for key, entry in self._held.items():
            if key in protected:
                continue
            looked += 1
            if chosen is None or entry[1] < self._held[chosen][1]:
                chosen = key
            if looked == WINDOW:
                break
        for key, entry in list(self._held.items())[: looked if chosen else 0]:
            if key != chosen:
                entry[1] = (entry[1] + 1) // 2
        return chosen
