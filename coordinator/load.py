"""Loading the dense tree while the fleet is watched, so that a worker's death during a long load is seen and told."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from evrun.coordinator import card
from evrun.coordinator.engram_map import cached_token_map
from evrun.coordinator.fleet import Fleet
from evrun.coordinator.models.registry import Model, load_model
from evrun.coordinator.spec import CoordinatorSpec
from evrun.coordinator.status import StatusMaker
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint

PUMP_EVERY_S = 0.05


class Loading:
    """One load of a checkpoint's dense tree."""

    def __init__(self, spec: CoordinatorSpec, checkpoint: Checkpoint, fleet: Fleet, status: StatusMaker) -> None:
        self._spec, self._checkpoint, self._fleet, self._status = spec, checkpoint, fleet, status
        self._done_bytes = 0
        self._pumped_s = 0.0

    def model(self) -> Model:
        """Raises EvrunError for the checkpoint's faults, ShutdownError when the run ends meanwhile."""
        spec = self._spec
        started = time.monotonic()
        self._progress(0, "Engram token map")
        token_map: npt.NDArray[np.int32] | None = None
        if self._checkpoint.config.engram_layer_ids:
            token_map = cached_token_map(self._checkpoint.directory, self._checkpoint.config, spec.cache_dir)
        model = load_model(
            self._checkpoint,
            dtype=spec.dtype,
            numerics=spec.numerics,
            dense_dtype=spec.dense_dtype,
            device=card.torch_device(spec.device),
            token_map=token_map,
            progress=self._progress,
        )
        gib = self._checkpoint.dense_bytes / 2**30
        self._status.dense(
            [
                f"dense tree: {spec.device}, {gib:.3f} GiB as {spec.dense_dtype} in {time.monotonic() - started:.1f} s, "
                f"numerics {spec.numerics}, dtype {spec.dtype}, {spec.threads} thread(s)"
            ]
        )
        return model

    def _progress(self, done_bytes: int, what: str) -> None:
        self._done_bytes += done_bytes
        now = time.monotonic()
        if now - self._pumped_s >= PUMP_EVERY_S:
            self._pumped_s = now
            self._status.loading(what, self._done_bytes, self._checkpoint.dense_bytes)
            self._fleet.changed = True
            self._fleet.pump(0.0)
