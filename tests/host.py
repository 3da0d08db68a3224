"""The processor that runs the tests, and whose sums they compare."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def _is_measured() -> bool:
    info = Path("/proc/cpuinfo").read_text() if platform.system() == "Linux" else ""
    return "AuthenticAMD" in info and " avx2 " in info and " avx512f " not in info


IS_MEASURED = _is_measured()
"""Whether torch sums in the order in which the golden data was made, as far as it was seen: AMD with AVX2 and no more."""

STEADY = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"}
"""Kernels that every x86-64 machine has. Slow, and no golden value sits on a step with them (experts in torch, as here)."""


def use_steady_sums() -> None:
    """Where the golden sums cannot be had, this process takes others that hold; processes that tests start do not."""
    if IS_MEASURED:
        return
    before = {name: os.environ.get(name) for name in STEADY}
    os.environ.update(STEADY)
    import torch

    torch.ones(64, 64) @ torch.ones(64, 64)  # both libraries have read their variables now
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
