"""Rows on the card: found in the cache, or brought in over the fastest rung into a cache or a staging slot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from evrun.expert_worker.card.cache import CardCache
from evrun.expert_worker.card.layout import RowLayout, lay_out, slot_bytes
from evrun.expert_worker.card.rungs import Arena, Registered
from evrun.expert_worker.card.slot_table import Key, SlotTable
from evrun.expert_worker.card.source_table import SourceTable
from evrun.expert_worker.counts import Counts
from evrun.expert_worker.timeline import Part
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.errors import DeviceError
from evrun.kernels.cuda.driver import Device, Event, Stream
from evrun.kernels.cuda.issue import Staging
from evrun.kernels.cuda.params import ROW_FIELDS

HALF = 8
"""Rows of a half of the staging memory: one half is filled while the kernels read the other."""
log = logging.getLogger("rows")


def staging_bytes(row_bytes: int) -> int:
    """Card memory that CardRows takes beside its cache."""
    return 2 * HALF * slot_bytes(row_bytes)


class CardRows:
    """The ladder of one card. Everything is allocated when it is made.

    cache_bytes  card memory for the cache; what does not hold a whole row is not taken
    pin_bytes    budget of the registered rung
    threads      that fill the arena
    rungs        rungs to use below the cache, in order
    """

    def __init__(
        self, device: Device, checkpoint: Checkpoint, cache_bytes: int, pin_bytes: int, threads: int, beat: Callable[[], None],
        rungs: Sequence[str] = ("registered", "arena"),
    ) -> None:  # fmt: skip
        self._device, self._checkpoint = device, checkpoint
        self._row_bytes = checkpoint.config.row_bytes
        self._slot_bytes = slot_bytes(self._row_bytes)
        layers, experts = checkpoint.config.num_hidden_layers, checkpoint.config.n_routed_experts
        slots = min(max(0, cache_bytes) // self._slot_bytes, layers * experts)
        self.cache = CardCache(slots, SlotTable(layers, experts))
        self._cache_memory = device.allocate(self.cache.slots * self._slot_bytes)
        self._staging_memory = device.allocate(staging_bytes(self._row_bytes))
        self.table = np.zeros((self.cache.slots + 2 * HALF, len(ROW_FIELDS)), np.uint64)
        """[slots, 6] addresses on the card of the tensors of the row in a slot: first the cache's slots, then the staging
        memory's."""
        self.copies = device.stream()
        self._passed: list[Event | None] = [None, None]
        """Per half of the staging memory: recorded once the kernels have read it."""
        self._arrived = [device.event(), device.event()]
        self._registered = Registered(device, checkpoint, pin_bytes, beat, self._release) if "registered" in rungs else None
        self._arena = Arena(device, checkpoint, threads, beat) if "arena" in rungs else None
        self._layouts: dict[Key, RowLayout] = {}
        self._sources = SourceTable(layers, experts)
        self.counts = Counts()

    @property
    def rung(self) -> str:
        """The rung that rows outside the cache take."""
        return "registered" if self._registered and self.counts["arena"] == 0 else "arena"

    def probe(self) -> None:
        """See which rungs this driver has, so that the worker says at its start where it stands."""
        if self._registered:
            problem = self._registered.probe(self._checkpoint.expert(0, 0)[0].shard)
            if problem:
                log.warning("rung arena instead of registered: %s; every row costs a host copy", problem)
                self._registered = None
        if self._registered is None and self._arena is None:
            raise DeviceError("no rung below the card cache works on this machine; allow the arena rung")

    def staging(self) -> Staging:
        """For native code that brings in rows itself."""
        memory = self._staging_memory.address, self._slot_bytes, self.cache.slots, 2 * HALF
        return Staging(
            self._sources.sources, self._sources.layouts, self.cache.table.num_free, self.copies, self._arrived, *memory,
            self.counts.address_of("registered"), self.counts.address_of("cache misses") if self.cache.slots else 0,
        )  # fmt: skip

    def catch_up(self) -> None:
        """Take note of what native code used; to be called before anything else is asked."""
        for key in self.cache.catch_up():
            if self._registered:
                self._registered.touch(self._layout(key).copies[0].shard)

    def resident(self, layer: int, experts: Sequence[int]) -> list[int] | None:
        """The slots of rows that are all in the cache; None when one is not, and nothing has happened then."""
        keys = [(layer, expert) for expert in experts]
        cache = self.cache
        if not all(map(cache.__contains__, keys)):
            return None
        self.counts["card"] += self._row_bytes * len(keys)
        return [slot for slot in map(cache.find, keys) if slot is not None]

    def staging_parts(self) -> list[Part]:
        """The host copies of the arena, for a timeline."""
        return [Part(self._arena, "copy", "stage"), Part(self._arena, "flush", "stage")] if self._arena else []

    def cut(self, layer: int, experts: Sequence[int], tail: int) -> list[list[int]]:
        """A call's experts in runs of which each needs at most HALF rows brought in, the last one at most `tail`: its
        kernels are what is left to do once the last byte has arrived."""
        missing = [(layer, expert) not in self.cache for expert in experts]
        last = sum(missing) - tail
        runs: list[list[int]] = [[]]
        brought = in_run = 0
        for expert, lacks in zip(experts, missing, strict=True):
            if lacks and in_run and (in_run == HALF or brought == last):
                runs.append([])
                in_run = 0
            brought += lacks
            in_run += lacks
            runs[-1].append(expert)
        return runs

    def bring_in(self, keys: Sequence[Key], run: int, compute: Stream, protected: set[Key]) -> list[int]:
        """Slots of the rows, on the card once `compute` gets there.

        run  number of the run within its call; runs take the halves of the staging memory in turn
        """
        half, staged, issued = run % 2, 0, False
        slots = []
        in_use = list({copy.shard for key in keys for copy in self._layout(key).copies})
        for key in keys:
            slot = self.cache.find(key)
            if slot is not None:
                self.counts["card"] += self._row_bytes
            else:
                slot = self.cache.admit(key, protected)
                if slot is None:
                    slot = self.cache.slots + half * HALF + staged
                    staged += 1
                    passed = self._passed[half]
                    if passed is not None:
                        self.copies.wait(passed)
                        self._passed[half] = None
                self._copy(key, slot, in_use)
                issued = True
            slots.append(slot)
        if issued:
            if self._arena:
                self._arena.flush(self.copies)
            arrived = self._arrived[half]
            arrived.record(self.copies)
            compute.wait(arrived)
        return slots

    def passed(self, run: int, event: Event) -> None:
        """The kernels of this run have read their rows once `event` is reached."""
        self._passed[run % 2] = event

    def forget(self, keys: Sequence[Key]) -> None:
        """Rows whose bytes are bad or did not arrive leave the cache."""
        for key in keys:
            self.cache.drop(key)

    def close(self) -> None:
        for part in (self._registered, self._arena):
            if part:
                part.close()
        self._cache_memory.close()
        self._staging_memory.close()

    def _layout(self, key: Key) -> RowLayout:
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = lay_out(self._checkpoint.expert(*key))
        return found

    def _release(self, shard: Path) -> None:
        self.copies.synchronize()
        self._sources.forget(shard)

    def _copy(self, key: Key, slot: int, in_use: Sequence[Path]) -> None:
        layout = self._layout(key)
        staged = slot - self.cache.slots
        base = self._cache_memory.address + slot * self._slot_bytes
        if staged >= 0:
            base = self._staging_memory.address + staged * self._slot_bytes
        self.table[slot] = [base + place for place in layout.tensors]
        for copy in layout.copies:
            address = self._registered.address(copy.shard, in_use) if self._registered else None
            if address is not None:
                self._device.copy_in(base + copy.to, address + copy.offset, copy.size_bytes, self.copies)
                self._sources.learn(key, layout, address)
                self.counts["registered"] += copy.size_bytes
            else:
                assert self._arena is not None, "a rung that serves every shard is always there"
                self._arena.copy(copy, base + copy.to, self.copies)
                self.counts["arena"] += copy.size_bytes
