"""What the kernels are handed: each takes fields of one structure as its parameters, by name."""

from __future__ import annotations

import ctypes

POINTER = ctypes.c_uint64


class Call(ctypes.Structure):
    """One layer call. T tokens, K experts a token, n experts of this rank, P <= T K pairs of a token and one of its experts."""

    _fields_ = [
        ("x", POINTER),  # [T, H] activation dtype
        ("ids", POINTER),  # [T, K] int32
        ("weights", POINTER),  # [T, K] fp32
        ("experts", POINTER),  # [n] int32, ascending
        ("rows", POINTER),  # [n] six addresses in the order of api.Row
        ("out", POINTER),  # partial [T, H] fp32, or exact rows [P, H] activation dtype
        ("status", POINTER),  # word in host memory, 1 once a sum was not finite
        ("x_prepared", POINTER),  # [T]
        ("act_prepared", POINTER),  # [P], or [n] for one token: what goes into w2
        ("y", POINTER),  # [P, H] activation dtype: what comes out of it
        ("counts", POINTER),  # [n] pairs of an expert
        ("pairs", POINTER),  # [P] token * K + draw, by expert
        ("place_of", POINTER),  # [T, K] inverse of pairs, -1 where an expert belongs to another rank
        ("found", POINTER),  # [n, 3] of find_bad_scale
        ("tokens", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("exact", ctypes.c_int32),
        ("accumulate", ctypes.c_int32),  # add to `out` instead of overwriting it
    ]


NOT_ON_16 = ("experts",)
"""Pointers that need not be multiples of 16: a call may begin in the middle of a list."""


def addresses(call: Call, names: tuple[str, ...], unused: int) -> ctypes.Array[ctypes.c_void_p]:
    """Where a launch finds each parameter: fields of `call`, then `unused` null pointers."""
    begin = ctypes.addressof(call)
    fields = [begin + int(getattr(Call, name).offset) for name in names]
    return (ctypes.c_void_p * (len(names) + unused))(*fields, *[ctypes.addressof(_NULL)] * unused)


_NULL = ctypes.c_void_p()
