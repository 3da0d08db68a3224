"""Triton's interpreter in the place of a card: the kernels' own source, run by numpy in ordinary memory.

Triton decides when it is imported whether its functions are compiled or interpreted, so nothing may import it before
this module. (The compiler runs in a process of its own.)
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from host_memory import HostMemory, HostStream

from evrun.kernels.cuda.driver import Limits
from evrun.kernels.triton.params import Call
from evrun.kernels.triton.plan import Unit

os.environ["TRITON_INTERPRET"] = "1"

AMPERE = Limits((8, 0), 108, 166912)
TURING = Limits((7, 5), 68, 65536)


class HostKernel:
    def __init__(self, unit: Unit, call: Call) -> None:
        self._function, self._constants, self._call = getattr(sources(), unit.kernel), dict(unit.constants), call
        if "TENSOR_CORES" in self._constants:
            self._constants["TENSOR_CORES"] = 0  # numpy multiplies no bfloat16; the fp32 operands hold the same values

    def launch(self, blocks: int, stream: HostStream) -> None:
        names = [name for name in self._function.arg_names if name not in self._constants]
        self._function[(blocks,)](**{name: getattr(self._call, name) for name in names}, **self._constants)


class HostCard:
    """triton.backend.Card by the interpreter, cut as for a card with these limits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def allocate(self, size_bytes: int) -> HostMemory:
        return HostMemory(size_bytes)

    pinned = allocate

    def stream(self) -> HostStream:
        return HostStream()

    def fill(self, to: int, byte: int, size_bytes: int, stream: HostStream) -> None:
        ctypes.memset(to, byte, size_bytes)

    def copy_out(self, host: int, source: int, size_bytes: int, stream: HostStream) -> None:
        ctypes.memmove(host, source, size_bytes)

    def kernels(self, units: Sequence[Unit], call: Call, cache: Path) -> list[HostKernel]:
        return [HostKernel(unit, call) for unit in units]


def sources() -> Any:
    """The kernels, interpreted."""
    from evrun.kernels.triton import sources as module

    assert type(module.combine_rows).__name__ == "InterpretedFunction", "triton was imported before, for compiling"
    return module
