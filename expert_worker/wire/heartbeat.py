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
    """The writing side. `memory` is the record's place in the rank's reply memory."""

    def __init__(self, memory: memoryview, incarnation: int, pid: int) -> None:
        self._words = memory[: 8 * RECORD_WORDS].cast("q")
        """Items, not struct.pack_into: each word is one store, while pack_into zeroes its range first."""
        self._incarnation = incarnation
        self._pid = pid
        self._state = 0
        self._progress = 0
        self._layer = -1
        self._sequence = 0
        self.calls = 0
        self.beat()

    def beat(self, work: int = 1) -> None:
        """Note that the main loop got further."""
        self._progress += work
        now = time.monotonic_ns()
        fields = (self._incarnation, self._pid, self._state, self._progress, self._layer, self._sequence, self.calls, now)
        words = self._words
        for i, value in enumerate(fields):
            words[i] = value

    def enter(self, state: str) -> None:
        self._state = STATES.index(state)
        self.beat()

    def begin(self, layer: int, sequence: int) -> None:
        self._layer, self._sequence = layer, sequence
        self.enter("serving")


def read(memory: memoryview) -> Beat | None:
    """The newest record, or None when no incarnation has written one. A torn read shows at most a mix of two beats."""
    incarnation, pid, state, progress, layer, sequence, calls, at_ns = memory[: 8 * RECORD_WORDS].cast("q").tolist()
    if incarnation == 0 or not 0 <= state < len(STATES):
        return None
    return Beat(incarnation, pid, STATES[state], progress, layer, sequence, calls, at_ns / 1e9)
