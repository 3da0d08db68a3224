"""What the coordinator tells the launcher of itself: state, loading, requests, ranks, build report."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from evrun.coordinator import card, report
from evrun.coordinator.spec import CoordinatorSpec
from evrun.expert_worker.wire import supervision
from evrun.expert_worker.wire.checkpoint.config import ModelConfig

if TYPE_CHECKING:
    from evrun.coordinator.fleet import Fleet
    from evrun.coordinator.request_server import RequestServer


class StatusMaker:
    """The coordinator's phase, and `make`, which the fleet sends to the launcher."""

    def __init__(self, spec: CoordinatorSpec, config: ModelConfig, fleet: Fleet, requests: RequestServer, started: float) -> None:
        self._spec, self._config, self._fleet, self._requests = spec, config, fleet, requests
        self._started = started
        self._state, self._phase = "starting", "opening the checkpoint"
        self._done_bytes = self._total_bytes = 0
        self._dense_lines: list[str] = []
        self._running = False
        self.load_s = 0.0
        """Seconds from the process's start until it could serve."""

    def loading(self, what: str, done_bytes: int, total_bytes: int) -> None:
        self._phase, self._done_bytes, self._total_bytes = f"dense tree: {what}", done_bytes, total_bytes

    def dense(self, lines: list[str]) -> None:
        """Lines of the build report about the dense tree."""
        self._dense_lines = lines

    def waiting_for_workers(self) -> None:
        missing = [str(r.rank) for r in self._fleet.ranks if not r.live and r.state != "gone"]
        self._phase = f"waiting for rank {', '.join(missing)}"

    def loaded(self) -> None:
        self.load_s = time.monotonic() - self._started
        self._state, self._phase = "ready", "ready"
        self._fleet.changed = True

    def serving(self) -> None:
        self._state, self._phase, self._running = "serving", "serving a request", True
        self._fleet.changed = True

    def idle(self) -> None:
        if self._running:
            self._state, self._phase, self._running = "ready", "ready", False
            self._fleet.changed = True

    def experts_line(self) -> str:
        return report.experts_line(self._fleet.ranks, self._config.num_hidden_layers, self._spec.deal, self._spec.combine)

    def make(self) -> supervision.Status:
        ranks = self._fleet.ranks
        sharing = card.sharing_lines(self._spec.device, ranks, card.mps_runs(os.environ))
        lines = [*self._dense_lines, self.experts_line(), *report.missing_lines(ranks), *sharing] if self.load_s else []
        return supervision.Status(
            self._state,
            self._phase,
            self._done_bytes,
            self._total_bytes,
            self.load_s,
            int(self._running),
            self._requests.waiting(),
            max((r.last_layer for r in ranks), default=-1),
            lines,
            self._fleet.rank_status(),
        )
