"""One step of all processes as a Chrome trace, which chrome://tracing and ui.perfetto.dev open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evrun.expert_worker.timeline import Span


def trace(processes: Sequence[tuple[str, Sequence[Span]]]) -> dict[str, Any]:
    """processes: (name, spans); a row each. Times are microseconds from the first span."""
    first = min((s.start_ns for _, spans in processes for s in spans), default=0)
    events: list[dict[str, Any]] = []
    for number, (name, spans) in enumerate(processes):
        events.append({"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}})
        for span in spans:
            events.append(
                {
                    "ph": "X", "name": span.phase, "pid": number, "tid": 0, "ts": (span.start_ns - first) / 1e3,
                    "dur": (span.end_ns - span.start_ns) / 1e3,
                }
            )  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
