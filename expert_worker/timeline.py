"""When this process did what, for benchmarks: spans of wrapped methods, kept in memory, written at the end.

Nothing is wrapped unless a benchmark asks for it, so a run pays nothing. Times are CLOCK_MONOTONIC, the same for all
processes of a host.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

WORKER_PHASES = ("stage", "upload", "launch", "drain")
"""Host copies into pinned memory; copies issued to the card; kernels issued (on the CPU: computed); waiting for the card."""


class Span(NamedTuple):
    """One piece of work. Spans of a process nest."""

    phase: str
    start_ns: int
    end_ns: int


class Part(NamedTuple):
    """A method that belongs to a phase."""

    owner: object
    method: str
    phase: str


class Timeline:
    """Collects spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def wrap(self, parts: Sequence[Part]) -> None:
        """From now on these methods of these objects are timed. Methods that an owner lacks are left out."""
        for owner, method, phase in parts:
            if hasattr(owner, method):
                setattr(owner, method, self.timed(getattr(owner, method), phase))

    def timed(self, function: Any, phase: str) -> Any:
        """The function, with a span for every call of it."""
        spans, now = self.spans, time.monotonic_ns

        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            start = now()
            try:
                return function(*arguments, **options)
            finally:
                spans.append(Span(phase, start, now()))

        return timed

    def write(self, path: str) -> None:
        """As `read` takes it."""
        Path(path).write_text(json.dumps(self.spans))


def read(path: Path) -> list[Span]:
    """What a process wrote; empty when it was killed before that."""
    return [Span(*fields) for fields in json.loads(path.read_text())] if path.exists() else []
