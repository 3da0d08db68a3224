"""Routed experts on the CPU, in C++, straight from the packed rows: a ctypes module, without torch.

The library holds one variant per instruction set; all give the same bits. What is added in which order is defined
in csrc/layout.h. CMakeLists.txt at the root of the repository builds it.
"""

from __future__ import annotations

from evrun.kernels.native.backend import NativeBackend, create
from evrun.kernels.native.dequantise import Dequantise, dequantiser
from evrun.kernels.native.library import NativeLibraryError, Variant, probe, variants
from evrun.kernels.native.measure import measure

__all__ = [
    "Dequantise", "NativeBackend", "NativeLibraryError", "Variant", "create", "dequantiser", "measure", "probe", "variants",
]  # fmt: skip
