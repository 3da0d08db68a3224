"""The routed-expert function on one card by Triton's kernels: the contract of `cuda.backend.CudaBackend`, launch for launch.

One token takes three launches, more tokens six and a fill. No allocation, no copy, no wait; a call may be captured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from evrun.kernels.api import BadScaleError, Combine, FfnShape
from evrun.kernels.cuda.driver import Limits, Stream
from evrun.kernels.cuda.errors import NonFiniteError
from evrun.kernels.triton import plan as plans
from evrun.kernels.triton.params import Call
from evrun.kernels.triton.plan import Unit

_NOWHERE = 0x7FFFFFFF
_TENSORS = ("w1", "w3", "w2")


class _Memory(Protocol):
    address: int

    def close(self) -> None: ...


class _Word(_Memory, Protocol):
    device_address: int


class _Kernel(Protocol):
    def launch(self, blocks: int, stream: Any) -> None: ...


class Card(Protocol):
    """What the backend asks of a `driver.Device` that compiles; Triton's interpreter can take its place."""

    @property
    def limits(self) -> Limits: ...

    def allocate(self, size_bytes: int) -> _Memory: ...

    def pinned(self, size_bytes: int) -> _Word: ...

    def fill(self, to: int, byte: int, size_bytes: int, stream: Any) -> None: ...

    def copy_out(self, host: int, source: int, size_bytes: int, stream: Any) -> None: ...

    def stream(self) -> Any: ...

    def kernels(self, units: Sequence[Unit], call: Call, cache: Path) -> Sequence[_Kernel]: ...


class TritonBackend:
    """Made once per worker; the arguments are those of `CudaBackend`.

    Raises UnavailableError (no Triton), CompileError, DeviceError.
    """

    single = None
    """The sibling's way for one token whose rows the host names in the launch; here `call` takes one token like many."""

    def __init__(self, card: Card, shape: FfnShape, max_tokens: int, top_k: int, num_experts: int, cache: Path) -> None:
        self.shape, self.max_tokens, self.top_k, self._card, self._num_experts = shape, max_tokens, top_k, card, num_experts
        limits = card.limits
        self.name = "triton-mma" if limits.capability >= plans.TENSOR_CORES_FROM else "triton-fma"
        self._plan = plans.make_plan(shape, top_k, num_experts, limits)
        self._status = card.pinned(4)
        self._status_word = ctypes.c_uint32.from_address(self._status.address)
        self._status_word.value = 0
        self._held: list[_Memory] = [self._status]
        self.scratch_bytes = 0
        """Card memory held besides weights and the caller's buffers."""
        self._call = Call(status=self._status.device_address)
        self._allocate()
        units = self._plan.units(max_tokens)
        self._kernels = dict(zip(units, card.kernels(units, self._call, cache), strict=True))
        self._own_stream = card.stream()

    def _allocate(self) -> None:
        tokens, pairs = self.max_tokens, self.max_tokens * self.top_k
        prepared = 2 * plans.planes(self.shape)
        sizes = {
            "x_prepared": tokens * self.shape.hidden * prepared,
            "act_prepared": pairs * self.shape.intermediate * prepared,
            "found": self._num_experts * len(_TENSORS) * 4,
        }
        if tokens > 1:
            sizes |= {
                "y": pairs * self.shape.hidden * (2 if self.shape.dtype == "bfloat16" else 4),
                "counts": self._num_experts * 4,
                "pairs": pairs * 4,
                "place_of": pairs * 4,
            }
        for name, size in sizes.items():
            memory = self._card.allocate(size)
            self._held.append(memory)
            self.scratch_bytes += size
            setattr(self._call, name, memory.address)

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
        """One layer call, as `CudaBackend.call`. Raises DeviceError."""
        if not 1 <= tokens <= self.max_tokens:
            raise ValueError(f"call of {tokens} tokens on a backend made for 1 to {self.max_tokens}")
        call = self._call
        call.x, call.ids, call.weights, call.experts, call.rows, call.out = x, ids, weights, experts, rows, out
        call.tokens, call.num_experts = tokens, num_experts
        call.exact, call.accumulate = int(combine == "exact"), int(accumulate)
        if num_experts == 0:
            if combine == "partial" and not accumulate:
                self._card.fill(out, 0, tokens * self.shape.hidden * 4, stream)
        elif tokens == 1:
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

    @property
    def suspicious(self) -> bool:
        """Whether `check` has something to say of a call that the stream has passed."""
        return self._status_word.value != 0

    def forget(self) -> None:
        """Drop what `check` would say."""
        self._status_word.value = 0

    def check(self) -> None:
        """As `CudaBackend.check`. Raises BadScaleError, NonFiniteError, DeviceError."""
        if not self.suspicious:
            return
        self.forget()
        found = np.empty((self._call.num_experts, len(_TENSORS)), np.int32)
        self._launch(self._plan.find_bad_scale, found.size, self._own_stream)
        self._card.copy_out(found.ctypes.data, self._call.found, found.nbytes, self._own_stream)
        self._own_stream.synchronize()
        bad = np.argwhere(found != _NOWHERE)
        if not len(bad):
            raise NonFiniteError("a sum of the routed experts is infinite or NaN, and no scale byte is 255")
        expert, tensor = map(int, bad[0])
        raise BadScaleError(expert, _TENSORS[tensor], int(found[expert, tensor]))

    def close(self) -> None:
        """Give the card memory back. Nothing of the backend may still run."""
        for memory in self._held:
            memory.close()
        self._held.clear()


def _blocks(size: int, step: int) -> int:
    return -(-size // step)
