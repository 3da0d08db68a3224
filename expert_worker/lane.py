"""How a worker computes a call: one lane per kind of device. A lane knows rows and kernels, nothing of messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from evrun.expert_worker.rows import Rows
from evrun.expert_worker.spec import WorkerSpec
from evrun.expert_worker.timeline import Part
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.errors import DeviceError, PayloadError
from evrun.expert_worker.wire.slots import ReplyMemory
from evrun.kernels import registry, self_test
from evrun.kernels.api import BadScaleError, Combine, FfnShape


class Lane(Protocol):
    """Everything is allocated when it is made; `backend` and `rung` are what the build report and `ps` show."""

    @property
    def backend(self) -> str: ...

    @property
    def rung(self) -> str: ...

    @property
    def bytes_by_rung(self) -> dict[str, int]: ...

    def compute(
        self, layer: int, experts: Sequence[int], x: npt.NDArray[Any], ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32],
        out: npt.NDArray[Any],
    ) -> int:  # fmt: skip
        """One call (kernels.api.CpuBackend.call). Returns the rows computed. Raises PayloadError for the data's faults."""
        ...

    def parts(self) -> list[Part]:
        """What a call consists of, by phase, for a timeline."""
        ...


class CpuLane:
    """Rows computed in place, from the mapping itself: no copy at all."""

    rung = "in-place"

    def __init__(self, spec: WorkerSpec, config: ModelConfig, rows: Rows, beat: Callable[[], None]) -> None:
        self._rows = rows
        self._beat = beat
        self._combine: Combine = "exact" if spec.combine == "exact" else "partial"
        self._row_bytes = config.row_bytes
        shape = FfnShape(
            config.hidden_size,
            config.moe_intermediate_size,
            config.swiglu_limit,
            "reference" if spec.numerics == "reference" else "weights-only",
            "bfloat16" if spec.dtype == "bfloat16" else "float32",
        )
        name, _, variant = spec.backend.partition("-")
        options = (spec.threads, spec.cpus, variant or None)
        tiny = self_test.shape_like(shape)
        problem = self_test.run(registry.create(name, tiny, self_test.TOKENS, 1, *options), tiny)
        if problem:
            raise DeviceError(f"kernel self-test of {spec.backend} failed: {problem}; choose another with --cpu-kernel")
        self._kernel = registry.create(name, shape, spec.prefill_chunk, config.num_experts_per_tok, *options)
        self.backend = f"cpu {self._kernel.name}"
        self.bytes_by_rung = {self.rung: 0}

    def compute(
        self, layer: int, experts: Sequence[int], x: npt.NDArray[Any], ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32],
        out: npt.NDArray[Any],
    ) -> int:  # fmt: skip
        rows = [self._rows.row(layer, expert) for expert in experts]
        try:
            done = self._kernel.call(x, ids, weights, experts, rows, out, self._combine, self._beat)
        except BadScaleError as bad:
            raise PayloadError(self._rows.describe(layer, experts[bad.expert], bad)) from bad
        self.bytes_by_rung[self.rung] += len(experts) * self._row_bytes
        return done


    def parts(self) -> list[Part]:
        """See Lane."""
        return [Part(self._kernel, "call", "launch")]


class EmptyLane:
    """Computes nothing: what is left of a layer call is the way there and back (`evrun bench ipc`)."""

    backend = rung = "empty"

    def __init__(self) -> None:
        self.bytes_by_rung: dict[str, int] = {}

    def compute(
        self, layer: int, experts: Sequence[int], x: npt.NDArray[Any], ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32],
        out: npt.NDArray[Any],
    ) -> int:  # fmt: skip
        return len(experts) if len(ids) == 1 else int(np.isin(ids, experts).sum())

    def parts(self) -> list[Part]:
        return []


def open_lane(spec: WorkerSpec, checkpoint: Checkpoint, reply: ReplyMemory, beat: Callable[[], None]) -> Lane:
    """The lane of the spec's device. Raises DeviceError."""
    if spec.backend == "empty":
        return EmptyLane()
    if spec.device == "cpu":
        return CpuLane(spec, checkpoint.config, Rows(checkpoint), beat)
    from evrun.expert_worker.card.lane import CardLane

    return CardLane(spec, checkpoint, reply, beat)
