"""How a worker computes a call: one lane per kind of device. A lane knows rows and kernels, nothing of messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from evrun.expert_worker.counts import Counts
from evrun.expert_worker.rows import Rows
from evrun.expert_worker.spec import WorkerSpec
from evrun.expert_worker.timeline import Part
from evrun.expert_worker.wire import exchange
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.errors import DeviceError, PayloadError
from evrun.expert_worker.wire.link import Short
from evrun.expert_worker.wire.slots import ReplyMemory
from evrun.kernels import registry, self_test
from evrun.kernels.api import BadScaleError, Combine, FfnShape


class Lane(Protocol):
    """Everything is allocated when it is made; `backend` and `rung` are what the build report and `ps` show."""

    counts: Counts

    @property
    def backend(self) -> str: ...

    @property
    def rung(self) -> str: ...

    @property
    def short(self) -> Short | None:
        """A native function that computes calls of one token; None where there is none."""
        ...

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
        self.counts = Counts()
        table = config.num_hidden_layers, config.n_routed_experts, config.row_bytes
        self.short = self._kernel.one_token(*table, self._combine == "exact", self.counts.address_of(self.rung))

    def compute(
        self, layer: int, experts: Sequence[int], x: npt.NDArray[Any], ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32],
        out: npt.NDArray[Any],
    ) -> int:  # fmt: skip
        rows = [self._rows.row(layer, expert) for expert in experts]
        try:
            done = self._kernel.call(x, ids, weights, experts, rows, out, self._combine, self._beat)
        except BadScaleError as bad:
            raise PayloadError(self._rows.describe(layer, experts[bad.expert], bad)) from bad
        self.counts[self.rung] += len(experts) * self._row_bytes
        if self.short and len(x) == 1:
            for expert, row in zip(experts, rows, strict=True):
                self.short.learn(layer, expert, row)
        return done


    def parts(self) -> list[Part]:
        """See Lane."""
        return [Part(self._kernel, "call", "launch")]


class EmptyLane:
    """Computes nothing: what is left of a layer call is the way there and back (`evrun bench ipc`)."""

    backend = rung = "empty"

    def __init__(self) -> None:
        self.counts = Counts()
        self.short = exchange.empty_lane()

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
