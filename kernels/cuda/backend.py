"""The routed-expert function on one card, from addresses on the card to an address on the card.

A call is launches on the caller's stream and nothing else: no allocation, no copy, no wait; it may be captured in a
graph. `call` is for any number of tokens and takes six to eight launches; `call_single` is for one token and takes one (a
few, if the card's shared memory does not hold all its experts; `single` is None if not even one).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from evrun.kernels.api import BadScaleError, Combine, FfnShape
from evrun.kernels.cuda import plan as plans
from evrun.kernels.cuda.compile import Unit
from evrun.kernels.cuda.driver import Limits, Stream
from evrun.kernels.cuda.errors import NonFiniteError
from evrun.kernels.cuda.params import ROW_BYTES, Call
from evrun.kernels.cuda.single import SingleToken

_THREADS = 256
"""Of the kernels that only move or round."""
_NOT_FOUND = (1 << 64) - 1


class _Memory(Protocol):
    address: int

    def close(self) -> None: ...


class _Word(_Memory, Protocol):
    device_address: int


class _Kernel(Protocol):
    @property
    def function(self) -> Any: ...

    def launch(self, blocks: int, threads: int, stream: Any, params: ctypes.Structure, cooperative: bool = False) -> None: ...

    def blocks_per_multiprocessor(self, threads: int) -> int: ...


class Card(Protocol):
    """What the backend asks of a `driver.Device` that compiles; an emulated card can take its place."""

    @property
    def limits(self) -> Limits: ...

    def allocate(self, size_bytes: int) -> _Memory: ...

    def pinned(self, size_bytes: int) -> _Word: ...

    def copy_in(self, to: int, host: int, size_bytes: int, stream: Any) -> None: ...

    def fill(self, to: int, byte: int, size_bytes: int, stream: Any) -> None: ...

    def copy_out(self, host: int, source: int, size_bytes: int, stream: Any) -> None: ...

    def stream(self) -> Any: ...

    def kernel(self, unit: Unit, name: str, shared_bytes: int, cache: Path) -> _Kernel: ...


class CudaBackend:
    """Made once per worker; `name` says which kernels it runs.

    card          the device, current in the thread that calls
    max_tokens    T of the largest call
    num_experts   expert ids are below this
    cache         folder of compiled kernels
    Raises UnavailableError, CompileError, DeviceError.
    """

    def __init__(self, card: Card, shape: FfnShape, max_tokens: int, top_k: int, num_experts: int, cache: Path) -> None:
        limits = card.limits
        self.shape, self.max_tokens, self.top_k, self._card = shape, max_tokens, top_k, card
        singles = plans.plan_single_token(shape, top_k, limits)
        self._multi = plans.plan_multi_token(shape, num_experts, limits)
        self._blocks = limits.multiprocessors
        self.name = "cuda-wgmma" if self._multi.wgmma else "cuda-mma"
        units = plans.units(shape, num_experts, singles, self._multi)
        self._find_bad_scale = card.kernel(units.find_bad_scale, "find_bad_scale", 0, cache)
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

        self._status = card.pinned(4)
        self._status_word = ctypes.c_uint32.from_address(self._status.address)
        self._status_word.value = 0
        self._held: list[_Memory] = [self._status]
        self.scratch_bytes = 0
        """Card memory held besides weights and the caller's buffers."""
        self._call = Call(top_k=top_k, status=self._status.device_address, byte=256)
        self._allocate(max_tokens, num_experts, many=max_tokens > 1 or not kernels)
        self._own_stream = card.stream()
        self.single = SingleToken(card, shape, kernels, self._status.device_address) if kernels else None
        """The kernels of `call_single`."""
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

    def _allocate(self, tokens: int, num_experts: int, many: bool) -> None:
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
        for name, size in sizes.items():
            memory = self._card.allocate(size)
            self._held.append(memory)
            self.scratch_bytes += size
            setattr(self._call, name, memory.address)
        self._own_rows = self._call.rows
        self._single_rows: npt.NDArray[np.uint64] | None = None
        """The rows of the last call, if it was one of a single token."""

    def call(
        self,
        stream: Stream,
        tokens: int,
        x: int,
        ids: int,
        weights: int,
        experts: int,
        rows: int,
        num_experts: int,
        out: int,
        combine: Combine,
        accumulate: bool = False,
    ) -> None:
        """A layer call of any number of tokens, or the part of one that concerns some of its experts. Every argument from
        `x` to `rows` and `out` is an address that the card can read or write; all must stay valid until the stream has passed
        the call.

        tokens      T, 1 <= T <= max_tokens
        x           [T, H] activation dtype, 16-byte aligned
        ids         [T, K] int32: every expert of the call; those not in `experts` belong to others
        weights     [T, K] fp32
        experts     [num_experts] int32, ascending
        rows        [num_experts] six addresses each, in the order of `api.Row`; each 16-byte aligned
        out         `partial`: [T, H] fp32; `exact`: [>= pairs, H] activation dtype, expert ascending, then token ascending
        accumulate  `partial`: add to what `out` holds. Calls over runs of the experts, ascending, give the bits of one call.

        A sum that is not finite is reported by the next `check`. Raises DeviceError.
        """
        if not 1 <= tokens <= self.max_tokens:
            raise ValueError(f"call of {tokens} tokens on a backend made for 1 to {self.max_tokens}")
        call, self._single_rows = self._call, None
        call.x, call.ids, call.weights, call.experts, call.rows, call.out = x, ids, weights, experts, rows, out
        call.tokens, call.num_experts = tokens, num_experts
        call.exact, call.accumulate = int(combine == "exact"), int(accumulate)
        if num_experts == 0:
            if combine == "partial" and not accumulate:
                self._card.fill(out, 0, tokens * self.shape.hidden * 4, stream)
        else:
            self._call_multi(stream, tokens, num_experts)

    def call_single(
        self,
        stream: Stream,
        x: int,
        rows: npt.NDArray[np.uint64],
        routes: Sequence[float],
        out: int,
        combine: Combine,
        accumulate: bool = False,
    ) -> None:
        """A layer call of one token, or the part of one that concerns some of its experts; `single` must not be None.

        x, out, accumulate, DeviceError: as in `call`
        rows                             [n <= top_k, 6] addresses, only of experts that the token uses, in the order of their ids
        routes                           n route weights
        """
        assert self.single is not None
        self._single_rows = rows
        if len(rows):
            self.single.call(stream, x, rows, routes, out, combine == "exact", accumulate)
        elif combine == "partial" and not accumulate:
            self._card.fill(out, 0, self.shape.hidden * 4, stream)

    def _call_multi(self, stream: Stream, tokens: int, num_experts: int) -> None:
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

    @property
    def status_address(self) -> int:
        """Host address of the uint32 that `suspicious` looks at."""
        return self._status.address

    @property
    def suspicious(self) -> bool:
        """Whether `check` has something to say of a call that the stream has passed."""
        return self._status_word.value != 0

    def forget(self) -> None:
        """Drop what `check` would say."""
        self._status_word.value = 0

    def check(self) -> None:
        """To be asked once the stream has passed a call, before its rows may change. Costs a read of host memory.

        Raises BadScaleError (a scale byte of that call is 255), NonFiniteError (none is), DeviceError.
        """
        if not self._status_word.value:
            return
        self._status_word.value = 0
        stream, found = self._own_stream, ctypes.c_uint64()
        rows = self._single_rows
        if rows is not None:
            self._call.num_experts = len(rows)
            self._card.copy_in(self._own_rows, rows.ctypes.data, rows.nbytes, stream)
            self._call.rows = self._own_rows
        self._card.fill(self._call.found, 0xFF, 8, stream)
        self._find_bad_scale.launch(self._call.num_experts * 3, _THREADS, stream, self._call)
        self._card.copy_out(ctypes.addressof(found), self._call.found, 8, stream)
        stream.synchronize()
        if found.value == _NOT_FOUND:
            raise NonFiniteError("a sum of the routed experts is infinite or NaN, and no scale byte is 255")
        raise BadScaleError(found.value >> 34, ("w1", "w3", "w2")[found.value >> 32 & 3], found.value & 0xFFFFFFFF)

    def close(self) -> None:
        """Give the card memory back. Nothing of the backend may still run."""
        for memory in self._held:
            memory.close()
        self._held.clear()
