"""`/metrics`: the front end's own counters, and the launcher's newest words as gauges and counters by rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from evrun.launch.http.gate import Gate
from evrun.launch.http.health import judge
from evrun.launch.http.watch import Watch

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """Made once per process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.prompt_tokens = Counter("evrun_prompt_tokens", "Tokens of prompts that were begun.", registry=self.registry)
        self.generated_tokens = Counter("evrun_generated_tokens", "Tokens generated.", registry=self.registry)
        self.first_token_s = Histogram(
            "evrun_time_to_first_token_seconds",
            "From a request's admission to its first token.",
            buckets=FIRST_TOKEN_S,
            registry=self.registry,
        )
        self.token_s = Histogram(
            "evrun_time_per_output_token_seconds", "Mean over a request's tokens after the first.", buckets=TOKEN_S, registry=self.registry
        )
        self.responses = Counter("evrun_http_responses", "Responses by path and status.", ["path", "status"], registry=self.registry)

    def watch(self, gate: Gate, watch: Watch, stall_s: float, stuck_s: float) -> None:
        """Let every reading also show the gate and the run."""
        self.registry.register(_RunCollector(gate, watch, stall_s, stuck_s))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _RunCollector:
    def __init__(self, gate: Gate, watch: Watch, stall_s: float, stuck_s: float) -> None:
        self._gate, self._watch, self._stall_s, self._stuck_s = gate, watch, stall_s, stuck_s

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("evrun_requests_running", "Requests of this front end that the model works on.", self._gate.running)
        yield GaugeMetricFamily("evrun_requests_waiting", "Requests of this front end in the queue.", self._gate.waiting)
        yield GaugeMetricFamily("evrun_queue_limit", "Most requests that may wait.", self._gate.max_queue)
        healthy = judge(self._watch.seen(), self._stall_s, self._stuck_s).serves
        yield GaugeMetricFamily("evrun_healthy", "1 when /health says 200.", int(healthy))
        if self._watch.look is not None:
            yield from _of_processes(self._watch.look["ps"]["processes"])


def _of_processes(rows: list[dict[str, Any]]) -> Iterator[Metric]:
    restarts = CounterMetricFamily("evrun_restarts", "Restarts of a process.", labels=["process", "rank"])
    state = GaugeMetricFamily("evrun_rank_state", "1 for the state that a rank is in.", labels=["rank", "state"])
    rung = GaugeMetricFamily("evrun_rank_rung", "1 for the rung that a rank's rows come from.", labels=["rank", "rung"])
    resends = CounterMetricFamily("evrun_resends", "Pieces of layer calls that were sent again.", labels=["rank"])
    dropped = CounterMetricFamily("evrun_dropped_replies", "Replies that were damaged, late or unasked for.", labels=["rank"])
    read = CounterMetricFamily("evrun_row_bytes", "Bytes of expert rows by the rung that they came from.", labels=["rank", "rung"])
    cache = CounterMetricFamily("evrun_row_cache", "Hits, misses and evictions of a rank's row cache.", labels=["rank", "event"])
    for row in rows:
        rank = "" if row["rank"] is None else str(row["rank"])
        restarts.add_metric([row["role"], rank], row["restarts"])
        if row["role"] != "worker":
            continue
        state.add_metric([rank, row["state"]], 1)
        if row["rung"]:
            rung.add_metric([rank, row["rung"]], 1)
        resends.add_metric([rank], row["resends"])
        dropped.add_metric([rank], row["dropped_replies"])
        for name, count in row["bytes"].items():
            if name.startswith("cache_"):
                cache.add_metric([rank, name.removeprefix("cache_")], count)
            else:
                read.add_metric([rank, name], count)
    yield from (restarts, state, rung, resends, dropped, read, cache)
