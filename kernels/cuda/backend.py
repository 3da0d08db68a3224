"""The routed-expert function on one card, from addresses on the card to an address on the card.

`call` is for any number of tokens and takes six to eight launches; `call_single` is for one token and takes one (a
few, if the card's shared memory does not hold all its experts; `single` is None if not even one).
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Protocol

from evrun.kernels import card_backend
from evrun.kernels.api import FfnShape
from evrun.kernels.card_backend import TENSORS, CardBackend
from evrun.kernels.cuda import plan as plans
from evrun.kernels.cuda.compile import Unit
from evrun.kernels.cuda.driver import Stream
from evrun.kernels.cuda.params import ROW_BYTES, Call
from evrun.kernels.cuda.single import SingleToken

_THREADS = 256
"""Of the kernels that only move or round."""
_NOT_FOUND = (1 << 64) - 1


class _Kernel(Protocol):
    @property
    def function(self) -> Any: ...

    def launch(self, blocks: int, threads: int, stream: Any, params: ctypes.Structure, cooperative: bool = False) -> None: ...

    def blocks_per_multiprocessor(self, threads: int) -> int: ...


class Card(card_backend.Card, Protocol):
    """What this backend asks of a `driver.Device` that compiles."""

    def copy_in(self, to: int, host: int, size_bytes: int, stream: Any) -> None: ...

    def kernel(self, unit: Unit, name: str, shared_bytes: int, cache: Path) -> _Kernel: ...


class CudaBackend(CardBackend):
    """Made once per worker.

    card          the device, current in the thread that calls
    max_tokens    T of the largest call
    num_experts   expert ids are below this
    cache         folder of compiled kernels
    Raises UnavailableError, CompileError, DeviceError.
    """

    def __init__(self, card: Card, shape: FfnShape, max_tokens: int, top_k: int, num_experts: int, cache: Path) -> None:
        super().__init__(card, shape, max_tokens, top_k, Call(top_k=top_k, byte=256))
        self._card, limits = card, card.limits
        singles = plans.plan_single_token(shape, top_k, limits)
        self._multi = plans.plan_multi_token(shape, num_experts, limits)
        self._blocks = limits.multiprocessors
        self.name = "cuda-wgmma" if self._multi.wgmma else "cuda-mma"
        units = plans.units(shape, num_experts, singles, self._multi)
        self._scale_finder = card.kernel(units.find_bad_scale, "find_bad_scale", 0, cache)
        kernels = [
            (plan, card.kernel(unit, "moe_single_token_fp4", plan.shared_bytes, cache))
            for plan, unit in zip(singles, units.single_token, strict=True)
        ]
        if max_tokens > 1 or not kernels:
            self._group = card.kernel(units.group_tokens, "group_tokens", plans.group_tokens_shared_bytes(num_experts), cache)
            self._prepare_x = card.kernel(units.prepare, "prepare_x", 0, cache)
            self._prepare_act = card.kernel(units.prepare, "prepare_act", 0, cache)
            self._combine = card.kernel(units.combine, "combine_rows", 4 * (top_k + 1), cache)
            self._up = self._matrix_kernels("moe_multi_token_up", units.multi_token, cache)
            self._down = self._matrix_kernels("moe_multi_token_down", units.multi_token, cache)

        self._allocate(self._sizes(max_tokens, num_experts, many=max_tokens > 1 or not kernels))
        self._own_rows = self._call.rows
        self._own_stream = card.stream()
        self.single = SingleToken(card, shape, kernels, self._status.device_address) if kernels else None
        if self.single:
            self._held += self.single.held
            self.scratch_bytes += self.single.scratch_bytes

    def _matrix_kernels(self, name: str, units: tuple[Unit, ...], cache: Path) -> list[tuple[plans.Tiling, _Kernel, int]]:
        """(tiling, kernel, blocks) of every tiling."""
        kernels = []
        for tiling, unit in zip(self._multi.tilings, units, strict=True):
            kernel = self._card.kernel(unit, name, tiling.shared_bytes, cache)
            kernels.append((tiling, kernel, self._blocks * max(1, kernel.blocks_per_multiprocessor(tiling.threads))))
        return kernels

    def _sizes(self, tokens: int, num_experts: int, many: bool) -> dict[str, int]:
        """Bytes of card memory by the field of `params.Call` that points there."""
        hidden, intermediate, pairs = self.shape.hidden, self.shape.intermediate, tokens * self.top_k
        value = 2 if self.shape.dtype == "bfloat16" else 4
        prepared = 2 * plans.planes(self.shape)
        sizes = {"found": 8, "rows": ROW_BYTES * self.top_k}
        if many:
            sizes |= {
                "act": pairs * intermediate * value,
                "y": pairs * hidden * value,
                "x_prepared": tokens * hidden * prepared,
                "x_scales": tokens * hidden // 32 * 4,
                "act_prepared": pairs * intermediate * prepared,
                "act_scales": pairs * intermediate // 32 * 4,
                "counts": num_experts * 4,
                "offsets": num_experts * 4 + 4,
                "pairs": pairs * 4,
                "place_of": pairs * 4,
            }
        return sizes

    def _issue(self, stream: Stream, tokens: int, num_experts: int) -> None:
        call, shape = self._call, self.shape
        scratch_y = call.y
        if call.exact:
            call.y = call.out
        self._group.launch(num_experts, _THREADS, stream, call)
        self._prepare_x.launch(self._prepare_blocks(tokens * shape.hidden), _THREADS, stream, call)
        self._launch_matrix(self._up, stream, tokens)
        self._prepare_act.launch(self._prepare_blocks(tokens * self.top_k * shape.intermediate), _THREADS, stream, call)
        self._launch_matrix(self._down, stream, tokens)
        if not call.exact:
            self._combine.launch(tokens, _THREADS, stream, call)
        call.y = scratch_y

    def _launch_matrix(self, kernels: list[tuple[plans.Tiling, _Kernel, int]], stream: Stream, tokens: int) -> None:
        for tiling, kernel, blocks in kernels:
            if tokens >= tiling.least_tokens:
                kernel.launch(blocks, tiling.threads, stream, self._call)

    def _prepare_blocks(self, channels: int) -> int:
        return min(self._blocks * 8, -(-channels // (8 * _THREADS)))

    def _find_bad_scale(self) -> tuple[int, int, int] | None:
        stream, found = self._own_stream, ctypes.c_uint64()
        rows = self._single_rows
        if rows is not None:
            self._call.num_experts = len(rows)
            self._card.copy_in(self._own_rows, rows.ctypes.data, rows.nbytes, stream)
            self._call.rows = self._own_rows
        self._card.fill(self._call.found, 0xFF, 8, stream)
        self._scale_finder.launch(self._call.num_experts * len(TENSORS), _THREADS, stream, self._call)
        self._card.copy_out(ctypes.addressof(found), self._call.found, 8, stream)
        stream.synchronize()
        value = found.value
        return None if value == _NOT_FOUND else (value >> 34, value >> 32 & 3, value & 0xFFFFFFFF)
