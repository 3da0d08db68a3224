"""What the sibling backends of a card have in common: the call's parameters, the word that the kernels report in, memory.

A call is launches on the caller's stream and nothing else: no allocation, no copy, no wait; it may be captured in a graph.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from evrun.kernels.api import BadScaleError, Combine, FfnShape
from evrun.kernels.cuda.driver import Limits, Stream
from evrun.kernels.cuda.errors import NonFiniteError
from evrun.kernels.cuda.single import SingleToken

TENSORS = ("w1", "w3", "w2")


class Memory(Protocol):
    address: int

    def close(self) -> None: ...


class Word(Memory, Protocol):
    device_address: int


class Card(Protocol):
    """What every backend asks of a `driver.Device` that compiles; an emulated card can take its place."""

    @property
    def limits(self) -> Limits: ...

    def allocate(self, size_bytes: int) -> Memory: ...

    def pinned(self, size_bytes: int) -> Word: ...

    def fill(self, to: int, byte: int, size_bytes: int, stream: Any) -> None: ...

    def copy_out(self, host: int, source: int, size_bytes: int, stream: Any) -> None: ...

    def stream(self) -> Any: ...


class CardBackend(ABC):
    """Made once per worker; `name` says which kernels it runs."""

    name: str
    single: SingleToken | None = None
    """The kernels of one token whose rows the host names in the launch; None: `call` takes one token like many."""

    def __init__(self, card: Card, shape: FfnShape, max_tokens: int, top_k: int, parameters: Any) -> None:
        """`parameters`: the structure of a call, which has the arguments of `call` and `status`, among others."""
        self.shape, self.max_tokens, self.top_k, self._memory = shape, max_tokens, top_k, card
        self._status = card.pinned(4)
        self._status_word = ctypes.c_uint32.from_address(self._status.address)
        self._status_word.value = 0
        self._held: list[Memory] = [self._status]
        self.scratch_bytes = 0
        """Card memory held besides weights and the caller's buffers."""
        self._call = parameters
        self._call.status = self._status.device_address
        self._single_rows: npt.NDArray[np.uint64] | None = None
        """The rows of the last call, if it was one of `call_single`."""

    def _allocate(self, sizes: Mapping[str, int]) -> None:
        """Memory of these sizes, in bytes, for these fields of the parameters."""
        for name, size in sizes.items():
            memory = self._memory.allocate(size)
            self._held.append(memory)
            self.scratch_bytes += size
            setattr(self._call, name, memory.address)

    def call(
        self, stream: Stream, tokens: int, x: int, ids: int, weights: int, experts: int, rows: int, num_experts: int, out: int,
        combine: Combine, accumulate: bool = False,
    ) -> None:  # fmt: skip
        """A layer call of any number of tokens, or the part of one that concerns some of its experts. Every argument from
        `x` to `rows` and `out` is an address that the card can read or write; all must stay valid until the stream has passed
        the call.

        tokens      T, 1 <= T <= max_tokens; a backend made for one token may know `call_single` only
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
        if num_experts:
            self._issue(stream, tokens, num_experts)
        elif combine == "partial" and not accumulate:
            self._memory.fill(out, 0, tokens * self.shape.hidden * 4, stream)

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
            self._memory.fill(out, 0, self.shape.hidden * 4, stream)

    @abstractmethod
    def _issue(self, stream: Stream, tokens: int, num_experts: int) -> None:
        """The launches of the call whose parameters are set."""

    @abstractmethod
    def _find_bad_scale(self) -> tuple[int, int, int] | None:
        """(expert of the newest call, place in TENSORS, row) of a scale byte 255, the first one; waits for it."""

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
        if not self.suspicious:
            return
        self.forget()
        found = self._find_bad_scale()
        if found is None:
            raise NonFiniteError("a sum of the routed experts is infinite or NaN, and no scale byte is 255")
        expert, tensor, row = found
        raise BadScaleError(expert, TENSORS[tensor], row)

    def close(self) -> None:
        """Give the card memory back. Nothing of the backend may still run."""
        for memory in self._held:
            memory.close()
        self._held.clear()
