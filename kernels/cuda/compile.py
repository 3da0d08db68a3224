"""Kernel sources -> machine code, kept in a cache.

The cache key covers the source with everything it includes, the options, the architecture, and the versions of compiler
and driver. One process at a time compiles in a cache folder; files appear whole or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from evrun.kernels.cuda import params, wgmma
from evrun.kernels.cuda.nvrtc import Nvrtc

_SOURCES = files("evrun.kernels.cuda") / "csrc"
_HEADERS = ("bulk.cuh", "device.cuh", "formats.cuh", "single_token.cuh", "tiles.cuh", "wgmma.cuh")


@dataclass(frozen=True)
class Unit:
    """One source with its constants: what is compiled at once."""

    source: str
    defines: tuple[tuple[str, str], ...]

    @classmethod
    def make(cls, source: str, defines: Mapping[str, int | float | str]) -> Unit:
        return cls(source, tuple(sorted((name, _literal(value)) for name, value in defines.items())))

    def text(self) -> str:
        return (_SOURCES / self.source).read_text()

    def options(self) -> list[str]:
        return [f"--define-macro={name}={value}" for name, value in self.defines]


def headers() -> dict[str, str]:
    """Everything a source may include, by name."""
    return {
        **{name: (_SOURCES / name).read_text() for name in _HEADERS},
        "call.cuh": params.declaration(),
        "wgmma_generated.cuh": wgmma.declaration(),
    }


def architecture_for(capability: tuple[int, int], compiler: Nvrtc) -> str:
    """`sm_90a` for 9.0, whose own instructions need the suffix; `sm_XY`; PTX for a card newer than the compiler."""
    number = capability[0] * 10 + capability[1]
    known = compiler.architectures()
    if number not in known:
        return f"compute_{max(a for a in known if a < number)}"
    return f"sm_{number}a" if number == 90 else f"sm_{number}"


def compiled(unit: Unit, architecture: str, compiler: Nvrtc, driver_version: int, cache: Path) -> bytes:
    """The machine code of a unit, from the cache or fresh. Raises CompileError, OSError (cache folder)."""
    key = hashlib.sha256()
    included = headers()
    for part in (unit.text(), *unit.options(), *included, *included.values(), architecture, repr(compiler.version), str(driver_version)):
        key.update(part.encode())
        key.update(b"\0")
    path = cache / f"{Path(unit.source).stem}-{architecture}-{key.hexdigest()[:32]}.cubin"
    if path.exists():
        return path.read_bytes()
    cache.mkdir(parents=True, exist_ok=True)
    with only_compiler(cache):
        if not path.exists():
            code, _ = compiler.compile(unit.source, unit.text(), included, architecture, unit.options())
            with tempfile.NamedTemporaryFile(dir=cache, delete=False) as file:
                file.write(code)
            os.replace(file.name, path)
    return path.read_bytes()


@dataclass(frozen=True)
class Resources:
    """What the assembler says a kernel takes."""

    registers: int
    stack_bytes: int
    spilled_bytes: int


def resources(log: str) -> dict[str, Resources]:
    """Kernel name -> resources, from the log of a compilation with the option `--ptxas-options=-v`."""
    found: dict[str, Resources] = {}
    memory = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    pattern = rf"Compiling entry function '(\w+)'.*?{memory}.*?Used (\d+) registers"
    for name, stack, stores, loads, registers in re.findall(pattern, log, re.DOTALL):
        found[name] = Resources(int(registers), int(stack), int(stores) + int(loads))
    return found


def _literal(value: int | float | str) -> str:
    return f"{float(value).hex()}f" if isinstance(value, float) else str(value)


@contextmanager
def only_compiler(cache: Path) -> Iterator[None]:
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # let go when the file is closed, by death too
        yield
