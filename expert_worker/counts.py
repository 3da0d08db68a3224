"""What a worker counts since its start (messages.COUNTERS), as words that native code adds to as well."""

from __future__ import annotations

import ctypes

from evrun.expert_worker.wire.messages import COUNTERS

_PLACES = {name: place for place, name in enumerate(COUNTERS)}


class Counts:
    """By name; all begin at 0. `address`: of the int64 words, in the order of COUNTERS."""

    def __init__(self) -> None:
        self._words = (ctypes.c_int64 * len(COUNTERS))()
        self.address = ctypes.addressof(self._words)

    def __getitem__(self, name: str) -> int:
        return self._words[_PLACES[name]]

    def __setitem__(self, name: str, value: int) -> None:
        self._words[_PLACES[name]] = value

    def address_of(self, name: str) -> int:
        return self.address + 8 * _PLACES[name]

    def in_order(self) -> list[int]:
        return list(self._words)
