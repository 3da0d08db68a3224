"""The CUDA kernels' own source on an emulated card, against the torch reference.

`cuda_host/` replaces the headers with machine instructions by coroutines; everything else, from the plan to the
launches, is what runs on a card. What this cannot show is the card's own arithmetic and speed: see `test_card_kernels.py`.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cuda_cases import (
    VARIANTS,
    Make,
    check_companions,
    check_crowded_experts,
    check_extreme_scales,
    check_matches,
    check_refusals,
)
from host_memory import HostMemory, HostSide, HostStream

from evrun.kernels.api import Dtype, FfnShape, Numerics
from evrun.kernels.cuda import compile as compiling
from evrun.kernels.cuda import wgmma
from evrun.kernels.cuda.backend import CudaBackend
from evrun.kernels.cuda.compile import Unit
from evrun.kernels.cuda.driver import Limits

HOST = Path(__file__).parent / "cuda_host"
HOPPER = Limits((9, 0), 3, 232448)
TURING = Limits((7, 5), 2, 65536)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]  # compiles every kernel


class HostKernel:
    by_handle: ClassVar[list[Any]] = [None]

    def __init__(self, function: Any, shared_bytes: int) -> None:
        self._function, self._shared = function, shared_bytes
        self.function = len(self.by_handle)
        self.by_handle.append(function)

    def blocks_per_multiprocessor(self, threads: int) -> int:
        return 1

    def launch(self, blocks: int, threads: int, stream: HostStream, params: ctypes.Structure, cooperative: bool = False) -> None:
        self._function(ctypes.byref(params), blocks, threads, self._shared, 17 * blocks + threads)


C = ctypes
CALLED: list[int] = []
"""Launches that native code made."""


@C.CFUNCTYPE(C.c_int, C.c_void_p, *[C.c_uint] * 7, C.c_void_p, C.POINTER(C.c_void_p))
def launch(function: int, blocks: int, y: int, z: int, threads: int, ty: int, tz: int, shared: int, stream: int, parameters: Any) -> int:
    CALLED.append(function)
    HostKernel.by_handle[function](C.c_void_p(parameters[0]), blocks, threads, shared, 17 * blocks + threads)
    return 0


@C.CFUNCTYPE(C.c_int, C.c_uint64, C.c_void_p, C.c_size_t, C.c_void_p)
def copy_in(to: int, host: int, size: int, stream: int) -> int:
    C.memmove(to, host, size)
    return 0


@C.CFUNCTYPE(C.c_int, C.c_void_p)
def of_stream(stream: int) -> int:
    return 0


@C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_void_p)
def record(event: int, stream: int) -> int:
    return 0


@C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_void_p, C.c_uint)
def wait_for(stream: int, event: int, flags: int) -> int:
    return 0


DRIVER = {
    "cuLaunchCooperativeKernel": launch,
    "cuMemcpyHtoDAsync_v2": copy_in,
    "cuEventRecord": record,
    "cuStreamWaitEvent": wait_for,
    "cuStreamQuery": of_stream,
    "cuStreamSynchronize": of_stream,
}
"""What native code calls of the driver."""


class HostCard:
    """backend.Card, computed by g++'s code."""

    def __init__(self, limits: Limits, folder: Path) -> None:
        self.limits, self._folder = limits, folder

    def allocate(self, size_bytes: int) -> HostMemory:
        return HostMemory(size_bytes)

    pinned = allocate

    def address_of(self, function: str) -> int:
        return ctypes.cast(DRIVER[function], ctypes.c_void_p).value or 0

    def stream(self) -> HostStream:
        return HostStream()

    def fill(self, to: int, byte: int, size_bytes: int, stream: HostStream) -> None:
        ctypes.memset(to, byte, size_bytes)

    def copy_in(self, to: int, host: int, size_bytes: int, stream: HostStream) -> None:
        ctypes.memmove(to, host, size_bytes)

    def copy_out(self, host: int, source: int, size_bytes: int, stream: HostStream) -> None:
        ctypes.memmove(host, source, size_bytes)

    def kernel(self, unit: Unit, name: str, shared_bytes: int, cache: Path) -> HostKernel:
        return HostKernel(getattr(self._library(unit), name), shared_bytes)

    def _library(self, unit: Unit) -> ctypes.CDLL:
        host = {file.name: file.read_text() for file in HOST.glob("*.cuh")}
        files = compiling.headers() | {"wgmma_generated.cuh": wgmma.widths()} | host | {unit.source: unit.text()}
        key = hashlib.sha256(repr((files, unit)).encode()).hexdigest()[:16]
        path = self._folder / f"{Path(unit.source).stem}-{key}.so"
        if not path.exists():
            work = self._folder / path.stem
            work.mkdir()
            for name, text in files.items():
                (work / name).write_text(text)
            defines = [option.replace("--define-macro=", "-D") for option in unit.options()]
            command = ["g++", "-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-x", "c++", *defines, unit.source, "-o", str(path)]
            subprocess.run(command, cwd=work, check=True, capture_output=True, text=True)
        return ctypes.CDLL(str(path))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def side() -> HostSide:
    return HostSide()


def maker(limits: Limits, folder: Path) -> Make:
    return lambda *geometry: CudaBackend(HostCard(limits, folder), *geometry, folder)


def shape_of(hidden: int, intermediate: int, numerics: Numerics = "reference", dtype: Dtype = "bfloat16") -> FfnShape:
    return FfnShape(hidden, intermediate, 3.0, numerics, dtype)


@pytest.mark.parametrize(("numerics", "dtype"), VARIANTS)
@pytest.mark.parametrize("tokens", [1, 37])
def test_on_hopper(folder: Path, side: HostSide, numerics: Numerics, dtype: Dtype, tokens: int) -> None:
    held = 3 if tokens == 1 else [1, 2, 4, 7]
    check_matches(maker(HOPPER, folder), side, shape_of(256, 128, numerics, dtype), tokens, held=held)


@pytest.mark.parametrize(("numerics", "dtype"), [VARIANTS[0], VARIANTS[3]])
@pytest.mark.parametrize("tokens", [1, 37])
def test_on_turing(folder: Path, side: HostSide, numerics: Numerics, dtype: Dtype, tokens: int) -> None:
    held = 3 if tokens == 1 else [1, 2, 4, 7]
    check_matches(maker(TURING, folder), side, shape_of(96, 160, numerics, dtype), tokens, held=held)


@pytest.mark.parametrize(("limits", "hidden", "intermediate"), [(HOPPER, 96, 32), (HOPPER, 512, 288), (TURING, 544, 256)])
def test_one_token_in_ragged_sizes(folder: Path, side: HostSide, limits: Limits, hidden: int, intermediate: int) -> None:
    """K without a whole chunk or half, tiles across experts, blocks without a pair."""
    check_matches(maker(limits, folder), side, shape_of(hidden, intermediate), 1)


@pytest.mark.parametrize(("numerics", "dtype"), VARIANTS[:3])
@pytest.mark.parametrize(("hidden", "intermediate", "held"), [(512, 256, 3), (1024, 768, 2), (512, 1280, 1), (2560, 256, 5)])
def test_one_token_in_bulk(
    folder: Path, side: HostSide, numerics: Numerics, dtype: Dtype, hidden: int, intermediate: int, held: int
) -> None:
    """Whole splits and halves of them, stages of one to ten tiles, runs across experts, a ring that goes round."""
    check_matches(maker(HOPPER, folder), side, shape_of(hidden, intermediate, numerics, dtype), 1, held=held)


@pytest.mark.parametrize("tokens", [1, 37])
def test_companions(folder: Path, side: HostSide, tokens: int) -> None:
    check_companions(maker(HOPPER, folder), side, shape_of(256, 128), tokens)


@pytest.mark.parametrize("tokens", [1, 37])
def test_extreme_scales(folder: Path, side: HostSide, tokens: int) -> None:
    check_extreme_scales(maker(HOPPER, folder), side, shape_of(256, 128, "reference", "float32"), tokens)


@pytest.mark.parametrize("tokens", [1, 37])
def test_refusals(folder: Path, side: HostSide, tokens: int) -> None:
    check_refusals(maker(HOPPER, folder), side, shape_of(256, 128), tokens)


def test_crowded_experts(folder: Path, side: HostSide) -> None:
    check_crowded_experts(maker(HOPPER, folder), side, shape_of(256, 128))


def test_call_out_of_bounds(folder: Path, side: HostSide) -> None:
    shape = shape_of(256, 128)
    backend = maker(HOPPER, folder)(shape, 2, 3, 8)
    with pytest.raises(ValueError, match="3 tokens on a backend made for 1 to 2"):
        backend.call(side.stream, 3, 0, 0, 0, 0, 0, 1, 0, "partial")
