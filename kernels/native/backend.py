"""kernels.api.CpuBackend over the native library."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from evrun.kernels.api import BadScaleError, Combine, FfnShape, Row
from evrun.kernels.native import library
from evrun.kernels.native.one_token import OneToken

_TENSORS = {1: "w1", 3: "w3", 2: "w2"}
_INT32, _FLOAT32, _UINT8 = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.uint8)
_addressof, _from_buffer = ctypes.addressof, ctypes.c_char.from_buffer
_KEPT_ROWS = 16384
"""Rows whose addresses are remembered: asking numpy for one costs as much as the rest of a call."""


def create(
    shape: FfnShape, max_tokens: int, top_k: int, threads: int, cpus: Sequence[int] | None = None, variant: str | None = None
) -> NativeBackend:
    """Make a backend with its threads and all memory it will need.

    max_tokens  most tokens of a call; top_k: most experts of a token
    threads     the calling thread included
    cpus        [threads] thread i > 0 is pinned to cpus[i]; the calling thread is the caller's own to pin
    variant     a name of `variants()`; default: the last one that this CPU supports
    Raises NativeLibraryError (library, memory or threads), ValueError (an argument, what was expected).
    """
    if shape.hidden % 32 or shape.intermediate % 32 or min(shape.hidden, shape.intermediate) < 32:
        raise ValueError(f"hidden {shape.hidden} and intermediate {shape.intermediate}: expected multiples of 32")
    if min(max_tokens, top_k, threads) < 1:
        raise ValueError(f"max_tokens {max_tokens}, top_k {top_k}, threads {threads}: expected at least 1 each")
    if cpus is not None and len(cpus) < threads:
        raise ValueError(f"{len(cpus)} CPUs for {threads} threads: expected one each")
    known = library.variants()
    if variant is None:
        index = max(i for i, v in enumerate(known) if v.supported)
    else:
        names = [v.name for v in known]
        if variant not in names:
            raise ValueError(f"CPU kernel {variant!r}: unknown; known: {', '.join(names)}")
        index = names.index(variant)
        if not known[index].supported:
            raise ValueError(f"CPU kernel {variant!r} ({known[index].description}): not supported by this CPU")
    return NativeBackend(shape, max_tokens, top_k, threads, cpus, index, known[index].name)


class NativeBackend:
    """Made by `create`. One thread at a time may call it."""

    def __init__(
        self, shape: FfnShape, max_tokens: int, top_k: int, threads: int, cpus: Sequence[int] | None, index: int, variant: str
    ) -> None:
        self.name = f"native-{variant}"
        self.shape, self.max_tokens, self.top_k, self.threads = shape, max_tokens, top_k, threads
        self._library, self._hidden = library.load(), shape.hidden
        pinned = (ctypes.c_int32 * threads)(*list(cpus)[:threads]) if cpus is not None else None
        config = library.Config(
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            swiglu_limit=shape.swiglu_limit,
            quantise=shape.numerics == "reference",
            bfloat16=shape.dtype == "bfloat16",
            max_tokens=max_tokens,
            top_k=top_k,
            threads=threads,
            cpus=ctypes.addressof(pinned) if pinned is not None else None,
        )
        self._engine: int | None = self._library.evrun_create(index, ctypes.byref(config))
        if not self._engine:
            raise library.NativeLibraryError(f"{self.name}: no memory or no threads for {threads} threads and {max_tokens} tokens")
        x_dtype = np.dtype(shape.activation_dtype)
        self._partial_dtypes = (x_dtype, _INT32, _FLOAT32, _FLOAT32)
        self._exact_dtypes = (x_dtype, _INT32, _FLOAT32, x_dtype)
        self._call, self._fault = library.Call(), library.Fault()
        self._call_ref, self._fault_ref = ctypes.byref(self._call), ctypes.byref(self._fault)
        self._packed: dict[int, tuple[Row, bytes]] = {}
        self._beat: tuple[Callable[[], None], _Beat] | None = None

    def call(
        self,
        x: npt.NDArray[Any],
        ids: npt.NDArray[np.int32],
        weights: npt.NDArray[np.float32],
        experts: Sequence[int],
        rows: Sequence[Row],
        out: npt.NDArray[Any],
        combine: Combine,
        beat: Callable[[], None] | None = None,
    ) -> int:
        """See kernels.api.CpuBackend. Handing in the same Row objects again saves some microseconds each.

        Raises BadScaleError; ValueError (which argument, expected, got); whatever `beat` raised, after the call.
        """
        if self._engine is None:
            raise ValueError("the backend is closed")
        exact = combine == "exact"
        hidden, tokens, slots, out_rows = self._hidden, len(x), ids.shape[-1], len(out)
        pairs = (tokens, slots)
        if (
            (x.shape, ids.shape, weights.shape, out.shape) != ((tokens, hidden), pairs, pairs, (out_rows if exact else tokens, hidden))
            or (x.dtype, ids.dtype, weights.dtype, out.dtype) != (self._exact_dtypes if exact else self._partial_dtypes)
            or not (x.flags.c_contiguous and ids.flags.c_contiguous and weights.flags.c_contiguous and out.flags.c_contiguous)
            or len(experts) != len(rows)
        ):
            self._name_misfit(x, ids, weights, experts, rows, out, exact)
        call = self._call
        call.x, call.ids, call.weights, call.out = _address(x), _address(ids), _address(weights), _address(out)
        call.tokens, call.slots, call.num_experts, call.out_rows = tokens, slots, len(experts), out_rows
        call.exact = exact
        call.experts = array("i", experts).tobytes()
        call.rows = b"".join(map(self._addresses_of, rows))
        if beat is None:
            call.beat = None
            done = self._library.evrun_run(self._engine, self._call_ref, self._fault_ref)
        else:
            if self._beat is None or self._beat[0] is not beat:
                self._beat = (beat, _Beat(beat))
            handler = self._beat[1]
            call.beat = handler.address
            done = self._library.evrun_run(self._engine, self._call_ref, self._fault_ref)
            handler.raise_caught()
        if done < 0:
            self._refuse(done, tokens, slots, experts, out)
        return int(done)

    def one_token(self, layers: int, experts: int, row_bytes: int, exact: bool, read: int) -> OneToken:
        """See kernels.api.CpuBackend."""
        if self._engine is None:
            raise ValueError("the backend is closed")
        return OneToken(self._engine, self.top_k, exact, layers, experts, row_bytes, read, self._addresses_of)

    def close(self) -> None:
        """End the threads, free the memory, let go of the rows."""
        engine, self._engine = self._engine, None
        self._packed.clear()
        if engine:
            self._library.evrun_destroy(engine)

    def __del__(self) -> None:
        if getattr(self, "_engine", None):
            self.close()

    def read(self, ranges: Sequence[npt.NDArray[np.uint8]]) -> int:
        """Read the ranges once with this backend's threads and vector loads, doing nothing else: the floor of a timing."""
        starts = (ctypes.c_void_p * len(ranges))(*[r.ctypes.data for r in ranges])
        sizes = (ctypes.c_int64 * len(ranges))(*[r.nbytes for r in ranges])
        return int(self._library.evrun_read(self._engine, starts, sizes, len(ranges)))

    def multiply_add(self, steps: int) -> int:
        """Vector multiply-adds on registers by each thread, nothing else; returns the floating-point operations done."""
        return int(self._library.evrun_multiply_add(self._engine, steps))

    def _addresses_of(self, row: Row) -> bytes:
        """Of its six tensors, native uint64."""
        known = self._packed.get(id(row))
        return known[1] if known else self._pack(row)

    def _pack(self, row: Row) -> bytes:
        """The addresses of a row, checked once and remembered: the row is kept, so that its id stays its own."""
        h, i = self.shape.hidden, self.shape.intermediate
        shapes = ((i, h // 2), (i, h // 32), (i, h // 2), (i, h // 32), (h, i // 2), (h, i // 32))
        for name, values, expected in zip(Row._fields, row, shapes, strict=True):
            _check(name, values, _UINT8, expected)
        if len(self._packed) >= _KEPT_ROWS:
            self._packed.clear()
        packed = struct.pack("=6Q", *[values.ctypes.data for values in row])
        self._packed[id(row)] = (row, packed)
        return packed

    def _name_misfit(
        self,
        x: npt.NDArray[Any],
        ids: npt.NDArray[np.int32],
        weights: npt.NDArray[np.float32],
        experts: Sequence[int],
        rows: Sequence[Row],
        out: npt.NDArray[Any],
        exact: bool,
    ) -> None:
        tokens, hidden = len(x), self.shape.hidden
        pairs = (tokens, ids.shape[-1])
        expected = ((tokens, hidden), pairs, pairs, (len(out) if exact else tokens, hidden))
        dtypes = self._exact_dtypes if exact else self._partial_dtypes
        for name, value, dtype, shape in zip(("x", "ids", "weights", "out"), (x, ids, weights, out), dtypes, expected, strict=True):
            _check(name, value, dtype, shape)
        raise ValueError(f"{len(experts)} experts, {len(rows)} rows: expected as many")

    def _refuse(self, code: int, tokens: int, slots: int, experts: Sequence[int], out: npt.NDArray[Any]) -> None:
        fault = self._fault
        if code == library.BAD_SCALE:
            raise BadScaleError(fault.expert, _TENSORS[fault.tensor], fault.row)
        if code == library.DUPLICATE:
            raise ValueError(f"ids: token {fault.row} names expert {experts[fault.expert]} twice")
        raise ValueError(
            f"{tokens} tokens, {slots} experts a token, {out.shape[0]} rows in out: expected at most {self.max_tokens} tokens, "
            f"{self.top_k} experts a token, and with combine exact a row of out for every (token, expert) of this rank"
        )


class _Beat:
    """A Python callable as a C one. An exception cannot pass through C: it is kept and raised after the call."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._caught: BaseException | None = None

        def guarded(_: int | None) -> None:
            try:
                beat()
            except BaseException as error:
                self._caught = error

        self._function = library.BEAT(guarded)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value

    def raise_caught(self) -> None:
        caught, self._caught = self._caught, None
        if caught is not None:
            raise caught


def _address(values: Any) -> int:
    """Of an array's first element; `ndarray.ctypes` takes several times as long, but works for every array."""
    try:
        return _addressof(_from_buffer(values))
    except (TypeError, ValueError):  # read-only, or empty
        return int(values.ctypes.data)


def _check(name: str, values: npt.NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if values.shape != shape or values.dtype != dtype or not values.flags.c_contiguous:
        order = "" if values.flags.c_contiguous else ", not contiguous"
        raise ValueError(f"{name}: expected {dtype} {list(shape)}, got {values.dtype} {list(values.shape)}{order}")
