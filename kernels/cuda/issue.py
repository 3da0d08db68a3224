"""The shortest way of one token's call to a card: one native function that copies, launches and waits.

It is part of the native library (`kernels/native/csrc/card_issue.cpp`) and gets the driver's functions as addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from evrun.kernels.cuda.single import SingleToken
from evrun.kernels.native import library

_FUNCTIONS = (
    "cuLaunchCooperativeKernel", "cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuStreamWaitEvent", "cuStreamQuery", "cuStreamSynchronize",
)  # fmt: skip
PIECES = 2
SOURCE = np.dtype([("address", np.uint64, PIECES), ("size_bytes", np.int32, PIECES), ("to", np.int32, PIECES), ("layout", np.int64)])
"""A row in registered host memory: its pieces, and where they go in a slot; `layout`: where its tensors begin there. No size:
no piece."""


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p),
        ("blocks", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("experts_at_once", ctypes.c_int32),
    )


class _Card(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("launch", "copy_in", "record", "wait_for", "query", "synchronize")),
        *((name, ctypes.c_void_p) for name in ("stream", "parameters", "kernels", "rows")),
        ("pinned_x", ctypes.c_void_p),
        ("card_x", ctypes.c_uint64),
        ("x_bytes", ctypes.c_int64),
        ("spin_ns", ctypes.c_int64),
        ("num_kernels", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
    )


class _Staging(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("sources", "layouts", "num_free", "copies", "first_arrived", "last_arrived")),
        ("base", ctypes.c_uint64),
        ("slot_bytes", ctypes.c_int64),
        ("first_slot", ctypes.c_int64),
        ("slots", ctypes.c_int64),
        ("link_bytes", ctypes.c_void_p),
        ("misses", ctypes.c_void_p),
    )


class _Worker(ctypes.Structure):
    _fields_ = (
        ("card", ctypes.c_void_p),
        ("staging", _Staging),
        ("slot_of", ctypes.c_void_p),
        ("layers", ctypes.c_int64),
        ("experts", ctypes.c_int64),
        ("used", ctypes.c_void_p),
        ("num_used", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("out", ctypes.c_uint64),
        ("status", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("card_bytes", ctypes.c_void_p),
        ("hits", ctypes.c_void_p),
        ("exact", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Staging:
    """What native code needs to bring rows in.

    sources              [layers, experts] SOURCE; no piece: a call that needs the row is left to Python
    layouts              [n, 6] int64: bytes from the start of a slot to the row's tensors
    num_free             [1] int32: not 0: Python has a better place for rows that are missing
    copies, arrived      the driver.Stream of the copies, two driver.Event
    address, slot_bytes  card memory of `slots` rows, nothing of which is in use between calls
    first_slot           of the rows' table: where this memory's slots begin
    link_bytes, misses   addresses of int64: bytes and number of the rows brought in; misses 0: not counted
    """

    sources: npt.NDArray[Any]
    layouts: npt.NDArray[np.int64]
    num_free: npt.NDArray[np.int32]
    copies: Any
    arrived: Sequence[Any]
    address: int
    slot_bytes: int
    first_slot: int
    slots: int
    link_bytes: int
    misses: int

    def fields(self) -> _Staging:
        tables = (table.ctypes.data for table in (self.sources, self.layouts, self.num_free))
        memory = self.address, self.slot_bytes, self.first_slot, self.slots
        return _Staging(*tables, self.copies.handle, *(event.handle for event in self.arrived), *memory, self.link_bytes, self.misses)


class _Pinned(Protocol):
    address: int
    device_address: int


class Driver(Protocol):
    """What is asked of a `driver.Device`."""

    def address_of(self, function: str) -> int: ...


class NativeIssue:
    """Made once per worker; belongs to the thread that uses the card.

    stream   a driver.Stream
    rows     [slots, 6] uint64: addresses of a row's tensors, read at every call; those of staging slots are written
    pinned   holds x [H]
    card_x   device address x is copied to, or 0: the kernels read `pinned` over the link
    spin_s   longest time a wait asks again and again before it waits as the driver does
    Raises NativeLibraryError.
    """

    def __init__(
        self, driver: Driver, single: SingleToken, top_k: int, stream: Any, rows: npt.NDArray[np.uint64], pinned: _Pinned, card_x: int,
        x_bytes: int, spin_s: float,
    ) -> None:  # fmt: skip
        loaded = library.load()
        try:
            self._call, self._one_token = loaded.evrun_card_call, loaded.evrun_card_one_token
        except AttributeError:
            raise library.NativeLibraryError(f"{library.FILE_NAME} has no evrun_card_call: install again") from None
        self._parameters = single.new_parameters()
        self._parameters.x = card_x or pinned.device_address
        kernels = [_Kernel(k.function, p.blocks, p.threads, p.shared_bytes, p.experts_at_once) for p, k in single.kernels]
        self._kernels = (_Kernel * len(kernels))(*kernels)
        functions = (driver.address_of(name) for name in _FUNCTIONS)
        places = stream.handle, ctypes.addressof(self._parameters), ctypes.addressof(self._kernels), rows.ctypes.data, pinned.address
        self._card = _Card(*functions, *places, card_x, x_bytes, int(spin_s * 1e9), len(single.kernels), top_k)
        self._held = rows, pinned, stream
        self._experts: Any = (ctypes.c_int32 * top_k)()
        self._slots: Any = (ctypes.c_int32 * top_k)()
        pointer = ctypes.c_void_p
        self._call.argtypes = (pointer, pointer, pointer, pointer, pointer, pointer, ctypes.c_int32, ctypes.c_uint64, ctypes.c_int32)
        self._call.restype = ctypes.c_int32
        self._places = ctypes.addressof(self._card), ctypes.addressof(self._experts), ctypes.addressof(self._slots)

    def call(self, x: int, ids: int, weights: int, experts: Sequence[int], slots: Sequence[int], out: int, exact: bool) -> int:
        """A whole call, the wait included.

        x, ids, weights  host addresses of [H] activation dtype, [K] int32, [K] fp32
        experts, slots   at most top_k expert ids, ascending, and where their rows lie in `rows`; experts that ids do not name
                         are left out
        out              address as the card sees it: `params.OneToken.out`
        Returns how many experts were computed, or the driver's error as a negative number.
        """
        count = len(experts)
        self._experts[:count], self._slots[:count] = experts, slots
        card, own_experts, own_slots = self._places
        done: int = self._call(card, x, ids, weights, own_experts, own_slots, count, out, exact)
        return done

    def without_python(
        self, slot_of: npt.NDArray[np.int32], used: npt.NDArray[np.int32], num_used: npt.NDArray[np.int32], staging: Staging, out: int,
        status: int, row_bytes: int, card_bytes: int, hits: int, exact: bool,
    ) -> WithoutPython:  # fmt: skip
        """The same for a worker that serves such calls without Python, and brings in what is missing.

        slot_of           [layers, experts] int32: where each row lies in `rows`, -1: not on the card
        used, num_used    [n], [1] int32: rows used are noted there, layer * experts + expert; with no room left a call is refused
        out               as in `call`; status: host address of the kernels' word
        card_bytes, hits  addresses of int64: bytes and number of the rows that were on the card
        """
        fields = _Worker(
            self._places[0], staging.fields(), slot_of.ctypes.data, *slot_of.shape, used.ctypes.data, num_used.ctypes.data, len(used), out,
            status, row_bytes, card_bytes, hits, exact,
        )  # fmt: skip
        function = ctypes.cast(self._one_token, ctypes.c_void_p).value or 0
        return WithoutPython(function, fields, (self, slot_of, used, num_used, staging))


class WithoutPython:
    """`function` and `lane` are addresses, as in kernels.api.OneToken: int64 function(lane, call), -1 for a call that it leaves
    to others. Belongs to the thread that uses the card."""

    def __init__(self, function: int, fields: ctypes.Structure, held: tuple[object, ...]) -> None:
        self.function, self.lane = function, ctypes.addressof(fields)
        self._held = fields, held
