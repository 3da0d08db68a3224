"""The routed-expert function on one card by Triton's kernels: the contract of `card_backend.CardBackend`.

One token takes three launches, more tokens six and a fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from evrun.kernels import card_backend
from evrun.kernels.api import FfnShape
from evrun.kernels.card_backend import TENSORS, CardBackend
from evrun.kernels.cuda.driver import Stream
from evrun.kernels.triton import plan as plans
from evrun.kernels.triton.params import Call
from evrun.kernels.triton.plan import Unit

_NOWHERE = 0x7FFFFFFF


class _Kernel(Protocol):
    def launch(self, blocks: int, stream: Any) -> None: ...


class Card(card_backend.Card, Protocol):
    """What this backend asks of a `driver.Device` that compiles; Triton's interpreter can take its place."""

    def kernels(self, units: Sequence[Unit], call: Call, cache: Path) -> Sequence[_Kernel]: ...


class TritonBackend(CardBackend):
    """Made once per worker; the arguments are those of `CudaBackend`.

    Raises UnavailableError (no Triton), CompileError, DeviceError.
    """

    def __init__(self, card: Card, shape: FfnShape, max_tokens: int, top_k: int, num_experts: int, cache: Path) -> None:
        super().__init__(card, shape, max_tokens, top_k, Call())
        self._card, self._num_experts, limits = card, num_experts, card.limits
        self.name = "triton-mma" if limits.capability >= plans.TENSOR_CORES_FROM else "triton-fma"
        self._plan = plans.make_plan(shape, top_k, num_experts, limits)
        self._allocate(self._sizes())
        units = self._plan.units(max_tokens)
        self._kernels = dict(zip(units, card.kernels(units, self._call, cache), strict=True))
        self._own_stream = card.stream()

    def _sizes(self) -> dict[str, int]:
        """Bytes of card memory by the field of `params.Call` that points there."""
        tokens, pairs = self.max_tokens, self.max_tokens * self.top_k
        prepared = 2 * plans.planes(self.shape)
        sizes = {
            "x_prepared": tokens * self.shape.hidden * prepared,
            "act_prepared": pairs * self.shape.intermediate * prepared,
            "found": self._num_experts * len(TENSORS) * 4,
        }
        if tokens > 1:
            sizes |= {
                "y": pairs * self.shape.hidden * (2 if self.shape.dtype == "bfloat16" else 4),
                "counts": self._num_experts * 4,
                "pairs": pairs * 4,
                "place_of": pairs * 4,
            }
        return sizes

    def _issue(self, stream: Stream, tokens: int, num_experts: int) -> None:
        if tokens == 1:
            self._call_single(stream, num_experts)
        else:
            self._call_multi(stream, tokens, num_experts)

    def _call_single(self, stream: Stream, num_experts: int) -> None:
        plan, shape = self._plan, self.shape
        self._launch(plan.single_prepare, _blocks(shape.hidden, plans.X_CHANNELS), stream)
        self._launch(plan.single_up, num_experts * _blocks(shape.intermediate, plans.SINGLE_UP_ROWS), stream)
        self._launch(plan.single_down, _blocks(shape.hidden, plans.SINGLE_DOWN_ROWS), stream)

    def _call_multi(self, stream: Stream, tokens: int, num_experts: int) -> None:
        call, plan, shape = self._call, self._plan, self.shape
        tiling = plan.tilings_for(tokens)[-1]
        tiles = plans.token_tiles(tokens, self.top_k, num_experts, tiling.width)
        self._card.fill(call.place_of, 0xFF, tokens * self.top_k * 4, stream)
        self._launch(plan.count_tokens, num_experts, stream)
        self._launch(plan.place_tokens, num_experts, stream)
        self._launch(plan.multi_prepare, tokens * _blocks(shape.hidden, plans.X_CHANNELS), stream)
        self._launch(tiling.up, tiles * _blocks(shape.intermediate, tiling.rows), stream)
        scratch_y = call.y
        if call.exact:
            call.y = call.out
        self._launch(tiling.down, tiles * _blocks(shape.hidden, tiling.rows), stream)
        call.y = scratch_y
        if not call.exact:
            self._launch(plan.combine, tokens * _blocks(shape.hidden, plans.COMBINED_CHANNELS), stream)

    def _launch(self, unit: Unit, blocks: int, stream: Stream) -> None:
        self._kernels[unit].launch(blocks, stream)

    def _find_bad_scale(self) -> tuple[int, int, int] | None:
        found = np.empty((self._call.num_experts, len(TENSORS)), np.int32)
        self._launch(self._plan.find_bad_scale, found.size, self._own_stream)
        self._card.copy_out(found.ctypes.data, self._call.found, found.nbytes, self._own_stream)
        self._own_stream.synchronize()
        bad = np.argwhere(found != _NOWHERE)
        if not len(bad):
            return None
        expert, tensor = map(int, bad[0])
        return expert, tensor, int(found[expert, tensor])


def _blocks(size: int, step: int) -> int:
    return -(-size // step)
