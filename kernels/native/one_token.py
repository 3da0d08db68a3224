"""One token's call without Python: a native function and the table of rows that it reads (csrc/one_token.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from evrun.kernels.api import Row
from evrun.kernels.native import library


class _Lane(ctypes.Structure):
    _fields_ = (
        ("engine", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("layers", ctypes.c_int64),
        ("experts", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("read", ctypes.c_void_p),
        ("top_k", ctypes.c_int32),
        ("exact", ctypes.c_int32),
    )


class OneToken:
    """kernels.api.OneToken; made by `NativeBackend.one_token`."""

    def __init__(
        self, engine: int, top_k: int, exact: bool, layers: int, experts: int, row_bytes: int, read: int,
        addresses_of: Callable[[Row], bytes],
    ) -> None:  # fmt: skip
        """`addresses_of`: of a row's six tensors, native uint64."""
        loaded = library.load()
        self._addresses_of = addresses_of
        self._rows = np.zeros((layers, experts), "V48")
        self._lane = _Lane(engine, self._rows.ctypes.data, layers, experts, row_bytes, read, top_k, exact)
        self.lane = ctypes.addressof(self._lane)
        self.function = ctypes.cast(loaded.evrun_one_token, ctypes.c_void_p).value or 0

    def learn(self, layer: int, expert: int, row: Row) -> None:
        """See kernels.api.OneToken."""
        self._rows[layer, expert] = self._addresses_of(row)
