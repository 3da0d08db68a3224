"""Kernels -> machine code, kept in a cache; Triton itself runs in a process of its own, and only when something is missing.

The cache key covers the sources, the constants, the architecture, and the versions of Triton and the driver. One process
at a time compiles in a cache folder; files appear whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

from evrun.kernels.cuda.compile import only_compiler
from evrun.kernels.cuda.errors import CompileError, UnavailableError
from evrun.kernels.triton.plan import Unit

MINIMUM = (3, 3)
_SOURCES = ("sources.py", "compiler.py", "params.py")


@dataclass(frozen=True)
class Code:
    """Machine code of one kernel and how it is launched."""

    name: str
    shared_bytes: int
    parameters: tuple[str, ...]
    """Fields of `params.Call`, in order."""
    unused: int
    """Pointers that Triton wants behind them and these kernels do not need."""
    cubin: bytes


def version() -> str:
    """Of the installed Triton, which is not imported. Raises UnavailableError."""
    try:
        found = metadata.version("triton")
    except metadata.PackageNotFoundError:
        raise UnavailableError("Triton is not installed; pip install triton") from None
    if tuple(int(part) for part in found.split(".")[:2]) < MINIMUM:
        raise UnavailableError(f"Triton {found} is too old; {'.'.join(map(str, MINIMUM))} or newer is needed")
    return found


def compiled(units: Sequence[Unit], capability: tuple[int, int], driver_version: int, cache: Path) -> list[Code]:
    """The machine code of every unit, from the cache or fresh. Raises UnavailableError, CompileError, OSError (cache folder)."""
    triton = version()
    sources = b"".join((files("evrun.kernels.triton") / name).read_bytes() for name in _SOURCES)
    architecture = capability[0] * 10 + capability[1]

    def path_of(unit: Unit) -> Path:
        key = hashlib.sha256(sources + repr((unit, architecture, triton, driver_version)).encode()).hexdigest()[:32]
        return cache / f"{unit.kernel}-triton-{architecture}-{key}.cubin"

    paths = [path_of(unit) for unit in units]
    if not all(path.exists() for path in paths):
        cache.mkdir(parents=True, exist_ok=True)
        with only_compiler(cache):
            missing = {path: unit for path, unit in zip(paths, units, strict=True) if not path.exists()}
            for path, answer in zip(missing, run_compiler([(unit, architecture) for unit in missing.values()]), strict=True):
                with tempfile.NamedTemporaryFile(dir=cache, delete=False) as file:
                    file.write(answer)
                os.replace(file.name, path)
    return [read(path.read_bytes()) for path in paths]


def run_compiler(jobs: Sequence[tuple[Unit, int]]) -> list[bytes]:
    """What `compiler` writes for every unit and architecture (90 for capability 9.0). Raises CompileError."""
    with tempfile.TemporaryDirectory(prefix="evrun-triton-") as folder:
        # Triton's own cache and its interpreter are not for this process.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
        done = subprocess.run(
            [sys.executable, "-m", "evrun.kernels.triton.compiler", folder],
            input=json.dumps([asdict(unit) | {"architecture": architecture} for unit, architecture in jobs]),
            capture_output=True,
            text=True,
            env=environment | {"TRITON_CACHE_DIR": f"{folder}/cache"},
            cwd=folder,
        )
        answers = []
        for number, (unit, architecture) in enumerate(jobs):
            answer = Path(folder) / str(number)
            if not answer.exists():
                lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
                raise CompileError(unit.kernel, f"sm_{architecture}", f"error: {lines[-1]}\n{done.stderr}")
            answers.append(answer.read_bytes())
        return answers


def read(answer: bytes) -> Code:
    """An answer of `run_compiler`."""
    head, _, cubin = answer.partition(b"\n")
    described: dict[str, Any] = json.loads(head)
    return Code(described["name"], described["shared_bytes"], tuple(described["parameters"]), described["unused"], cubin)
