"""Generates the warpgroup matrix instruction for every width: its operands are single registers, up to 64 of them."""

from __future__ import annotations

NARROW_WIDTHS = (8, 16, 32)
WIDE_WIDTHS = (64, 96, 112)
"""Token widths of a tile, for the kernel of few and of many tokens; the smallest that holds the tile's tokens is used."""
WIDTHS = NARROW_WIDTHS + WIDE_WIDTHS


def declaration() -> str:
    """CUDA C++ (`wgmma_generated.cuh`): the widths, and wgmma<N> for each."""
    return widths() + "".join(map(_instruction, WIDTHS))


def widths() -> str:
    """Its first part, free of instructions."""
    text = "#pragma once\n"
    for name, values in {"NARROW": NARROW_WIDTHS, "WIDE": WIDE_WIDTHS}.items():
        text += f"#define WGMMA_{name}_WIDTHS {', '.join(map(str, values))}\nconstexpr int {name}_N = {max(values)};\n"
    return text


def _instruction(n: int) -> str:
    count = n // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(c[{i}])' for i in range(count))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    return f"""
template <>
DEVICE void wgmma<{n}>(float (&c)[{count}], const u32 (&a)[4], u64 b, bool add) {{
    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 5}, 0;"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{accumulators}}}, {{{a}}}, %{count + 4}, p, 1, 1, 0; }}"
        : {outputs}
        : {inputs}, "l"(b), "r"(int(add)));
}}
"""
