"""A call as a worker that serves without Python hands it to a lane's native function (kernels/native/csrc/one_token.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

RECORD = 4711


class Call(ctypes.Structure):
    _fields_ = (
        ("layer", ctypes.c_int64), ("count", ctypes.c_int64), ("experts", ctypes.c_void_p), ("x", ctypes.c_void_p),
        ("ids", ctypes.c_void_p), ("weights", ctypes.c_void_p), ("out", ctypes.c_void_p), ("beat", ctypes.c_void_p),
        ("record", ctypes.c_void_p),
    )  # fmt: skip


def serve(
    short: Any, layer: int, experts: Sequence[int], x: Any, ids: Any, weights: Any, out: Any,
    beat: Callable[[int | None], None] | None = None,
) -> int:  # fmt: skip
    """What the function of a lane's `short` answers; `beat` is called with RECORD."""
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)(short.function)
    own = np.array(experts, np.int32)
    progress = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(beat or (lambda record: None))
    places = [a.ctypes.data for a in (own, x, ids, weights, out)]
    call = Call(layer, len(own), *places, ctypes.cast(progress, ctypes.c_void_p), RECORD)
    return int(function(short.lane, ctypes.addressof(call)))
