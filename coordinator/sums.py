"""Sums of the dense tree that do not depend on the processor: what `--dtype float32` promises.

A float32 run is compared value by value, and where a value lies on a rounding step of E4M3 the last bit of one sum decides
everything after it. Vector width and vendor change that bit: MKL and ATen choose their kernels by the processor. Both can be
told to take the same ones on every x86-64 machine with AVX2. Price: products of many tokens take about four times as long,
of one token twice (two Xeon cores, 5120 x 1280). bfloat16 runs are loose anyway and keep the fastest kernels.
"""

from __future__ import annotations

import os

SAME_EVERYWHERE = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"}


def steady() -> dict[str, str]:
    """Ask for the same sums on every machine; call before torch is imported. A variable that is set already stays.

    Returns what is now in force.
    """
    return {name: os.environ.setdefault(name, value) for name, value in SAME_EVERYWHERE.items()}
