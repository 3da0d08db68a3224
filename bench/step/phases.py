"""Where the time of a pass goes: spans of the coordinator and of its workers -> seconds by phase. Pure.

The coordinator's time is cut into parts that follow each other, so they add up to the wall time: `dense tree` (everything of
the model but the head, the shared expert included), `deal`, `send`, then its wait for the workers, `combine`, `head`. The wait
is cut by what the slowest rank does meanwhile: `stage`, `upload`, `launch`, `drain`; what is left of it, the way back and
waking up, is `answer`. Work that a rank does while the coordinator computes the shared expert is hidden: it costs nothing and
shows in the worker's own seconds alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from evrun.expert_worker.timeline import WORKER_PHASES, Span

PHASES = ("dense tree", "deal", "send", *WORKER_PHASES, "answer", "combine", "head")


@dataclass(frozen=True)
class Pass:
    """One forward call: when it was, and the coordinator's spans in it."""

    kind: str
    """`prefill` or `decode`."""
    tokens: int
    layers: int
    start_ns: int
    end_ns: int
    spans: tuple[Span, ...]
    """submit and deal (one or more a layer), collect and combine (likewise), in order of their ends."""


@dataclass
class Seconds:
    """Of one pass, by phase."""

    visible: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Adds up to the pass, as the coordinator sees it."""
    worker: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WORKER_PHASES, 0.0))
    """Of the slowest rank of each layer call, hidden work too."""
    wall: float = 0.0


class RankSpans:
    """The spans of one worker over a whole run."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = sorted(spans, key=lambda s: s.end_ns)
        self._ends = [s.end_ns for s in self._spans]

    def between(self, start_ns: int, end_ns: int) -> list[Span]:
        """Those that lie in this time, in order of their ends."""
        found = self._spans[bisect_left(self._ends, start_ns) : bisect_right(self._ends, end_ns)]
        return [s for s in found if s.start_ns >= start_ns]


def split(one: Pass, ranks: Sequence[RankSpans]) -> Seconds:
    """Seconds by phase of one pass."""
    found = Seconds(wall=(one.end_ns - one.start_ns) / 1e9)
    at = one.start_ns
    submits = [s for s in one.spans if s.phase == "submit"]
    collects = [s for s in one.spans if s.phase == "collect"]
    assert len(submits) == one.layers, "a layer call without a span would count as dense tree"
    for submit, collect in zip(submits, collects, strict=True):
        found.visible["dense tree"] += (submit.start_ns - at + collect.start_ns - submit.end_ns) / 1e9
        dealt = _inside(one.spans, "deal", submit)
        found.visible["deal"] += dealt
        found.visible["send"] += (submit.end_ns - submit.start_ns) / 1e9 - dealt
        combined = [s for s in one.spans if s.phase == "combine" and collect.start_ns <= s.start_ns and s.end_ns <= collect.end_ns]
        found.visible["combine"] += sum(s.end_ns - s.start_ns for s in combined) / 1e9
        waited_until = combined[0].start_ns if combined else collect.end_ns
        found.visible["answer"] += (collect.end_ns - (combined[-1].end_ns if combined else collect.end_ns)) / 1e9
        _split_wait(found, collect.start_ns, waited_until, _slowest(ranks, submit.start_ns, collect.end_ns))
        at = collect.end_ns
    found.visible["head"] += (one.end_ns - at) / 1e9
    return found


def _split_wait(found: Seconds, start_ns: int, end_ns: int, spans: Sequence[Span]) -> None:
    visible = exclusive([_clip(s, start_ns, end_ns) for s in spans])
    for phase, nanoseconds in exclusive(spans).items():
        found.worker[phase] += nanoseconds / 1e9
    for phase, nanoseconds in visible.items():
        found.visible[phase] += nanoseconds / 1e9
    found.visible["answer"] += max(0, end_ns - start_ns - sum(visible.values())) / 1e9


def exclusive(spans: Sequence[Span]) -> dict[str, int]:
    """Nanoseconds of every worker phase, each without the spans that lie in it; `compute`, the whole call, counts as launch."""
    total = dict.fromkeys(WORKER_PHASES, 0)
    open_: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns)):
        size = span.end_ns - span.start_ns
        while open_ and open_[-1].end_ns <= span.start_ns:
            open_.pop()
        total[_named(span)] += size
        if open_:
            total[_named(open_[-1])] -= size
        open_.append(span)
    return total


def _named(span: Span) -> str:
    return span.phase if span.phase in WORKER_PHASES else "launch"


def _clip(span: Span, start_ns: int, end_ns: int) -> Span:
    start = min(max(span.start_ns, start_ns), end_ns)
    return Span(span.phase, start, max(start, min(span.end_ns, end_ns)))


def _slowest(ranks: Sequence[RankSpans], start_ns: int, end_ns: int) -> list[Span]:
    """The spans of the rank whose call ended last, of a layer call between these times."""
    found = [rank.between(start_ns, end_ns) for rank in ranks]
    return max((spans for spans in found if spans), key=lambda spans: spans[-1].end_ns, default=[])


def _inside(spans: Sequence[Span], phase: str, outer: Span) -> float:
    found = [s for s in spans if s.phase == phase and outer.start_ns <= s.start_ns and s.end_ns <= outer.end_ns]
    return sum(s.end_ns - s.start_ns for s in found) / 1e9

