"""The kernels of one token: which of them a launch takes, and the structure that a launch is handed as a whole.

Rows and route weights travel in the launch itself, so that the kernel starts with the weights and asks no memory first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from evrun.kernels.api import FfnShape
from evrun.kernels.cuda.params import Drawn, OneToken
from evrun.kernels.cuda.plan import SingleTokenPlan


class _Memory(Protocol):
    address: int

    def close(self) -> None: ...


class _Kernel(Protocol):
    @property
    def function(self) -> Any: ...

    def launch(self, blocks: int, threads: int, stream: Any, params: ctypes.Structure, cooperative: bool = False) -> None: ...


class _Card(Protocol):
    def allocate(self, size_bytes: int) -> _Memory: ...

    def fill(self, to: int, byte: int, size_bytes: int, stream: Any) -> None: ...

    def stream(self) -> Any: ...


class SingleToken:
    """Made once per backend. `kernels`: those of few experts first; `status`: the word of `params.OneToken`."""

    def __init__(self, card: _Card, shape: FfnShape, kernels: Sequence[tuple[SingleTokenPlan, _Kernel]], status: int) -> None:
        self.kernels = kernels
        most = max(plan.experts_at_once for plan, _ in kernels)
        words = most * shape.intermediate // (2 if shape.dtype == "bfloat16" else 1)
        self.held = [card.allocate(8 * words), card.allocate(8)]
        self.scratch_bytes = 8 * words + 8
        stream = card.stream()
        for memory, size in zip(self.held, (8 * words, 8), strict=True):
            card.fill(memory.address, 0, size, stream)
        stream.synchronize()
        self._type = _with_drawn(most)
        self._same = {"status": status, "act": self.held[0].address, "arrivals": self.held[1].address, "byte": 256}
        self._parameters = self.new_parameters()

    def new_parameters(self) -> Any:
        """`params.OneToken` with room for the experts of a launch, and what is the same in all launches filled in."""
        return self._type(**self._same)

    def kernel_for(self, num_experts: int) -> tuple[SingleTokenPlan, _Kernel]:
        """The one that holds this many experts with the least room to spare, or the one that holds most."""
        return next((k for k in self.kernels if k[0].experts_at_once >= num_experts), self.kernels[-1])

    def call(
        self, stream: Any, x: int, rows: npt.NDArray[np.uint64], routes: Sequence[float], out: int, exact: bool, accumulate: bool
    ) -> None:
        """See `CudaBackend.call_single`; at least one row."""
        params = self._parameters
        plan, kernel = self.kernel_for(len(rows))
        params.x, params.out, params.exact, params.accumulate = x, out, int(exact), int(accumulate)
        for first in range(0, len(rows), plan.experts_at_once):
            some = rows[first : first + plan.experts_at_once]
            for place, (row, route) in enumerate(zip(some.tolist(), routes[first:], strict=False)):
                params.drawn[place] = Drawn(*row, route)
            params.num_experts, params.first_place = len(some), first
            kernel.launch(plan.blocks, plan.threads, stream, params, cooperative=True)
            params.accumulate = 1


def _with_drawn(count: int) -> type[Any]:
    """`OneToken` with room for this many experts."""
    return type("OneTokenOf", (OneToken,), {"_fields_": [("drawn", Drawn * count)]})
