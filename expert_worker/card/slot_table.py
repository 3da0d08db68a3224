"""The card cache's slots as native code reads them, and which rows it used meanwhile (kernels/native/csrc/card_issue.cpp)."""

from __future__ import annotations

import numpy as np

Key = tuple[int, int]
CAPACITY = 1024
"""Uses that are noted before native code leaves a call to Python, which takes them."""


class SlotTable:
    """Of `layers` x `experts` rows."""

    def __init__(self, layers: int, experts: int) -> None:
        self.slots = np.full((layers, experts), -1, np.int32)
        """[layers, experts]; -1: not on the card."""
        self.used = np.zeros(CAPACITY, np.int32)
        """[CAPACITY] layer * experts + expert of the rows used, oldest first."""
        self.num_used = np.zeros(1, np.int32)
        self.num_free = np.zeros(1, np.int32)
        """Slots that no row is in: while there are some, a row that is missing is Python's to bring in."""
        self._experts = experts

    def put(self, key: Key, slot: int) -> None:
        self.slots[key] = slot
        self.num_free -= 1

    def remove(self, key: Key) -> None:
        self.slots[key] = -1
        self.num_free += 1

    def take_used(self) -> list[Key]:
        """The rows used since the last time, once for every use."""
        count = int(self.num_used[0])
        self.num_used[0] = 0
        return [divmod(row, self._experts) for row in self.used[:count].tolist()] if count else []
