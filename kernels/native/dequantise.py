"""Dense fp8 weights -> fp32 in C++, in one pass; the values of `formats.dequantise_fp8_tiles`."""

from __future__ import annotations

import functools
from collections.abc import Callable

from evrun.kernels.native import library

Dequantise = Callable[[int, int, int, int, int], None]
"""(codes, scales, rows, columns, out): host addresses of [rows, columns] uint8 E4M3 without NaNs, of fp32 values, one per
32 x 32 tile, and of [rows, columns] fp32."""


def dequantiser(variant: str | None = None) -> Dequantise:
    """By the best instruction set here, or the one named. Raises NativeLibraryError."""
    loaded, known = library.load(), library.variants()
    numbers = [i for i, v in enumerate(known) if v.supported and variant in (None, v.name)]
    if not numbers:
        raise library.NativeLibraryError(f"no variant {variant} here; supported: {', '.join(v.name for v in known if v.supported)}")
    return functools.partial(loaded.evrun_dequantise_fp8, numbers[-1])
