"""What the kernels are handed: a structure for many tokens and one for a single one, declared here for Python and, from
here, for CUDA C++."""

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
        ("exact", ctypes.c_int32),
        ("accumulate", ctypes.c_int32),  # add to `out` instead of overwriting it
        ("byte", ctypes.c_int32),  # 256: see `formats.cuh`
    ]


class Drawn(ctypes.Structure):
    """An expert that the token uses."""

    _fields_ = [
        *((name, POINTER) for name in ROW_FIELDS),
        ("route", ctypes.c_float),  # its weight
        ("unused", ctypes.c_int32),
    ]


class OneToken(ctypes.Structure):
    """One layer call of one token, or the part of it that one launch computes. `drawn` follows: [num_experts], ascending.

    It is a parameter of the launch as a whole, so that the kernel asks no memory for it.
    """

    _fields_ = [
        ("x", POINTER),  # [H] activation dtype
        ("out", POINTER),  # partial [H] fp32, or exact rows [.., H] activation dtype
        ("status", POINTER),  # word in host memory, 1 once a sum was not finite
        ("act", POINTER),  # [num_experts * I] what goes into w2, every word beside the number of its launch
        ("arrivals", POINTER),  # u64: blocks that ever started
        ("num_experts", ctypes.c_int32),
        ("first_place", ctypes.c_int32),  # exact: the row of `out` that belongs to the first expert
        ("exact", ctypes.c_int32),
        ("accumulate", ctypes.c_int32),  # partial: add to `out` instead of overwriting it
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
_ONE_TYPES = {"x": "const void*", "out": "void*", "status": "u32*", "act": "u64*", "arrivals": "u64*"}


def declaration() -> str:
    """The same structures in CUDA C++ (`call.cuh`)."""
    row = " ".join(f"const u8* {name};" for name in ROW_FIELDS)
    fields = "\n".join(f"    {_C_TYPES.get(name, 'int')} {name};" for name, *_ in Call._fields_)
    one = "\n".join(f"    {_ONE_TYPES.get(name, 'int')} {name};" for name, *_ in OneToken._fields_)
    sizes = f"sizeof(Call) == {ctypes.sizeof(Call)} && sizeof(Row) == {ROW_BYTES} && sizeof(Drawn) == {ctypes.sizeof(Drawn)}"
    return (
        f"#pragma once\nstruct Row {{ {row} }};\nstruct Call {{\n{fields}\n}};\n"
        "struct Drawn {\n    Row row;\n    float route;\n    int unused;\n};\n"
        f"template <int EXPERTS>\nstruct OneToken {{\n{one}\n    Drawn drawn[EXPERTS];\n}};\n"
        f"static_assert({sizes} && sizeof(OneToken<1>) == {ctypes.sizeof(OneToken) + ctypes.sizeof(Drawn)});\n"
    )
