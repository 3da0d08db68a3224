"""What the kernels are handed: one structure, declared here for Python and, from here, for CUDA C++."""

from __future__ import annotations

import ctypes

POINTER = ctypes.c_uint64
ROW_FIELDS = ("w1", "s1", "w3", "s3", "w2", "s2")
"""Order of the six addresses of a packed row, as in `api.Row`."""
ROW_BYTES = 8 * len(ROW_FIELDS)


class Call(ctypes.Structure):
    """One layer call. T tokens, K experts a token, n experts of this rank, P <= T K pairs of a token and one of its experts."""

    _fields_ = [
        ("x", POINTER),  # [T, H] activation dtype
        ("ids", POINTER),  # [T, K] int32
        ("weights", POINTER),  # [T, K] fp32
        ("experts", POINTER),  # [n] int32, ascending
        ("rows", POINTER),  # [n] Row
        ("out", POINTER),  # partial [T, H] fp32, or exact rows [P, H] activation dtype
        ("status", POINTER),  # word in host memory, 1 once a sum was not finite
        ("barrier", POINTER),  # word of sync_grid
        ("act", POINTER),  # [P, I] activation dtype: what goes into w2
        ("y", POINTER),  # [P, H] activation dtype: what comes out of it
        ("x_prepared", POINTER),
        ("x_scales", POINTER),
        ("act_prepared", POINTER),
        ("act_scales", POINTER),
        ("counts", POINTER),  # [n] pairs of an expert
        ("offsets", POINTER),  # [n + 1]
        ("pairs", POINTER),  # [P] token * K + place
        ("place_of", POINTER),  # [T, K]
        ("found", POINTER),  # u64 of find_bad_scale
        ("tokens", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("first_expert", ctypes.c_int32),  # single token: this launch is for num_experts from here on
        ("exact", ctypes.c_int32),
        ("accumulate", ctypes.c_int32),  # add to `out` instead of overwriting it
        ("byte", ctypes.c_int32),  # 256: see `formats.cuh`
        ("unused", ctypes.c_int32),
    ]


_C_TYPES = {
    "x": "const void*",
    "ids": "const int*",
    "weights": "const float*",
    "experts": "const int*",
    "rows": "const Row*",
    "out": "void*",
    "status": "u32*",
    "barrier": "u32*",
    "act": "void*",
    "y": "void*",
    "x_prepared": "void*",
    "x_scales": "float*",
    "act_prepared": "void*",
    "act_scales": "float*",
    "counts": "int*",
    "offsets": "int*",
    "pairs": "int*",
    "place_of": "int*",
    "found": "u64*",
}


def declaration() -> str:
    """The same structure in CUDA C++ (`call.cuh`)."""
    row = " ".join(f"const u8* {name};" for name in ROW_FIELDS)
    fields = "\n".join(f"    {_C_TYPES.get(name, 'int')} {name};" for name, *_ in Call._fields_)
    return (
        f"#pragma once\nstruct Row {{ {row} }};\nstruct Call {{\n{fields}\n}};\n"
        f"static_assert(sizeof(Call) == {ctypes.sizeof(Call)} && sizeof(Row) == {ROW_BYTES});\n"
    )
