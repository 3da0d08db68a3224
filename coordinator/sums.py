"""Sums of the dense tree that depend less on the processor: what `--dtype float32` asks for.

A float32 run is compared value by value, and where a value lies on a rounding step of E4M3 the last bit of one sum decides
everything after it. ATen sums rows in an order that its vector width decides, so a processor with AVX-512 gets another last
bit than one with AVX2, with which the golden data was made. It can be told to take the same width on both; that costs
nothing that was measurable. bfloat16 runs are loose anyway and keep the widest kernels.
"""

from __future__ import annotations

import os

VARIABLE, WIDTH = "ATEN_CPU_CAPABILITY", "avx2"


def steady() -> str:
    """Ask for the same sums everywhere; call before torch is imported. A user's own setting stays. Returns what is in force."""
    return os.environ.setdefault(VARIABLE, WIDTH)
