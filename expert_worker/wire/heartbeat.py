"""The progress record of a worker's main loop: the first bytes of its reply memory, written by it, read by others.

Liveness is progress of this record, never an answer of a helper thread: a loop that hangs stops counting. Times are
CLOCK_MONOTONIC, which all processes of a host share and no clock change moves.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

RECORD_WORDS = 8
RECORD_BYTES = 4096
"""Reserved at the start of a rank's reply memory; the rest of the page stays free."""

STATES = ("starting", "ready", "serving", "stopped")
_PID, _STATE, _PROGRESS, _LAYER, _SEQUENCE, _CALLS, _AT_NS = range(1, RECORD_WORDS)
"""Places of the words after the incarnation's."""


@dataclass(frozen=True)
class Beat:
    """One reading."""

    incarnation: int
    pid: int
    state: str
    progress: int
    """Grows with every piece of work: bytes mapped or staged, row blocks computed, calls answered."""
    layer: int
    """Layer of the newest call, -1 before the first."""
    sequence: int
    calls: int
    at_s: float
    """Monotonic time of the newest progress, seconds."""

    @property
    def age_s(self) -> float:
        return max(0.0, time.monotonic() - self.at_s)


class Heart:
    """The writing side. `memory` is the record's place in the rank's reply memory; native code that serves calls writes the
    same words (csrc/exchange.cpp), in the same thread."""

    def __init__(self, memory: memoryview, incarnation: int, pid: int) -> None:
        self._words = memory[: 8 * RECORD_WORDS].cast("q")
        """Items, not struct.pack_into: each word is one store, while pack_into zeroes its range first."""
        for place, value in ((_PID, pid), (_STATE, 0), (_PROGRESS, 0), (_LAYER, -1), (_SEQUENCE, 0), (_CALLS, 0), (0, incarnation)):
            self._words[place] = value
        self.beat()

    @property
    def calls(self) -> int:
        calls: int = self._words[_CALLS]
        return calls

    def beat(self, work: int = 1) -> None:
        """Note that the main loop got further."""
        words = self._words
        words[_PROGRESS] += work
        words[_AT_NS] = time.monotonic_ns()

    def enter(self, state: str) -> None:
        self._words[_STATE] = STATES.index(state)
        self.beat()

    def begin(self, layer: int, sequence: int) -> None:
        self._words[_LAYER], self._words[_SEQUENCE] = layer, sequence
        self.enter("serving")

    def answered(self) -> None:
        self._words[_CALLS] += 1


def read(memory: memoryview) -> Beat | None:
    """The newest record, or None when no incarnation has written one. A torn read shows at most a mix of two beats."""
    incarnation, pid, state, progress, layer, sequence, calls, at_ns = memory[: 8 * RECORD_WORDS].cast("q").tolist()
    if incarnation == 0 or not 0 <= state < len(STATES):
        return None
    return Beat(incarnation, pid, STATES[state], progress, layer, sequence, calls, at_ns / 1e9)
