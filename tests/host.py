"""The processor that runs the tests, and whose sums they compare."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from evrun.coordinator import sums


def _is_measured() -> bool:
    info = Path("/proc/cpuinfo").read_text() if platform.system() == "Linux" else ""
    return "AuthenticAMD" in info and " avx2 " in info and " avx512f " not in info


IS_MEASURED = _is_measured()
"""Whether torch sums in the order in which the golden data was made, as far as it was seen: AMD with AVX2 and no more."""


def use_steady_sums() -> None:
    """Where the golden sums cannot be had, this process takes those of `--dtype float32`; processes that tests start do not."""
    if IS_MEASURED:
        return
    before = {name: os.environ.get(name) for name in sums.SAME_EVERYWHERE}
    sums.steady()
    import torch

    torch.ones(64, 64) @ torch.ones(64, 64)  # both libraries have read their variables now
    for name, value in before.items():
        if value is None:
            del os.environ[name]
