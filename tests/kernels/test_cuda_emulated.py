"""The CUDA kernels' own source on an emulated card, against the torch reference.

`cuda_host/` replaces the one header with machine instructions by coroutines; everything else, from the plan to the
launches, is what runs on a card. What this cannot show is the card's own arithmetic and speed: see `test_cuda_card.py`.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evrun.kernels import reference
from evrun.kernels.api import Dtype, FfnShape, Numerics, Row, tokens_of
from evrun.kernels.cuda import compile as compiling
from evrun.kernels.cuda.backend import CudaBackend
from evrun.kernels.cuda.compile import Unit
from evrun.kernels.cuda.driver import Limits
from evrun.kernels.cuda.params import ROW_FIELDS
from evrun.kernels.formats import bfloat16_bits_to_float32, float32_to_bfloat16_bits

HOST = Path(__file__).parent / "cuda_host"
HOPPER = Limits((9, 0), 3, 232448)
TURING = Limits((7, 5), 2, 65536)
ALL_NUMERICS = [("reference", "bfloat16"), ("reference", "float32"), ("weights-only", "bfloat16"), ("weights-only", "float32")]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class HostMemory:
    def __init__(self, size_bytes: int) -> None:
        self.array = np.full(size_bytes + 16, 0xFF, np.uint8)
        self.address = -(-self.array.ctypes.data // 16) * 16
        self.device_address = self.address

    def close(self) -> None:
        self.address = 0


class HostStream:
    def synchronize(self) -> None:
        pass


class HostKernel:
    def __init__(self, function: Any, shared_bytes: int, blocks_limit: int) -> None:
        self._function, self._shared = function, shared_bytes

    def blocks_per_multiprocessor(self, threads: int) -> int:
        return 1

    def launch(self, blocks: int, threads: int, stream: HostStream, params: ctypes.Structure, cooperative: bool = False) -> None:
        self._function(ctypes.byref(params), blocks, threads, self._shared, 17 * blocks + threads)


class HostCard:
    """backend.Card, computed by g++'s code."""

    def __init__(self, limits: Limits, folder: Path) -> None:
        self.limits, self._folder = limits, folder

    def allocate(self, size_bytes: int) -> HostMemory:
        return HostMemory(size_bytes)

    pinned = allocate

    def stream(self) -> HostStream:
        return HostStream()

    def fill(self, to: int, byte: int, size_bytes: int, stream: HostStream) -> None:
        ctypes.memset(to, byte, size_bytes)

    def copy_out(self, host: int, source: int, size_bytes: int, stream: HostStream) -> None:
        ctypes.memmove(host, source, size_bytes)

    def kernel(self, unit: Unit, name: str, shared_bytes: int, cache: Path) -> HostKernel:
        return HostKernel(getattr(self._library(unit), name), shared_bytes, 4)

    def _library(self, unit: Unit) -> ctypes.CDLL:
        path = self._folder / f"{Path(unit.source).stem}-{hashlib.sha256(repr(unit).encode()).hexdigest()[:16]}.so"
        if not path.exists():
            work = self._folder / path.stem
            work.mkdir()
            host = {file.name: file.read_text() for file in HOST.glob("*.cuh")}
            for header, text in (compiling.headers() | {"wgmma_generated.cuh": ""} | host).items():
                (work / header).write_text(text)
            (work / unit.source).write_text(unit.text())
            defines = [option.replace("--define-macro=", "-D") for option in unit.options()]
            command = ["g++", "-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-x", "c++", *defines, unit.source, "-o", str(path)]
            subprocess.run(command, cwd=work, check=True, capture_output=True, text=True)
        return ctypes.CDLL(str(path))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@dataclass
class Problem:
    """A call with everything it needs, in numpy."""

    shape: FfnShape
    x: Any
    ids: Any
    weights: Any
    experts: list[int]
    rows: list[Row]

    def expected(self, combine: str = "partial") -> Any:
        pairs = sum(len(tokens_of(self.ids, self.weights, e)[0]) for e in self.experts)
        tokens, hidden = self.x.shape
        out = np.empty((tokens, hidden), np.float32) if combine == "partial" else np.empty((pairs, hidden), self.shape.activation_dtype)
        reference.create(self.shape, tokens, self.ids.shape[1], 1).call(self.x, self.ids, self.weights, self.experts, self.rows, out, combine)
        return out


def aligned(array: Any) -> Any:
    """The same values at an address that is a multiple of 16."""
    raw = np.empty(array.nbytes + 16, np.uint8)
    start = -raw.ctypes.data % 16
    view = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def random_row(random: np.random.Generator, shape: FfnShape, low: int, high: int) -> Row:
    def matrix(n: int, k: int) -> tuple[Any, Any]:
        codes = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
        return aligned(codes), aligned(random.integers(low, high + 1, (n, k // 32)).astype(np.uint8))

    h, i = shape.hidden, shape.intermediate
    return Row(*matrix(i, h), *matrix(i, h), *matrix(h, i))


def problem(
    numerics: Numerics, dtype: Dtype, hidden: int, intermediate: int, tokens: int, top_k: int, experts: int, held: list[int], seed: int = 0
) -> Problem:
    random = np.random.default_rng(seed)
    shape = FfnShape(hidden, intermediate, 3.0, numerics, dtype)
    x = random.standard_normal((tokens, hidden)).astype(np.float32) * np.exp2(random.integers(-3, 3, (tokens, hidden))).astype(np.float32)
    stored = float32_to_bfloat16_bits(x) if dtype == "bfloat16" else x
    ids = np.stack([random.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    weights = random.uniform(0.1, 0.6, (tokens, top_k)).astype(np.float32)
    rows = [random_row(random, shape, 116, 122) for _ in held]
    return Problem(shape, aligned(stored), aligned(ids), aligned(weights), held, rows)


def address(array: Any) -> int:
    return int(array.ctypes.data)


def compute(backend: CudaBackend, p: Problem, combine: str = "partial", accumulate_onto: Any = None) -> Any:
    tokens, hidden = p.x.shape
    table = aligned(np.array([[address(getattr(row, name)) for name in ROW_FIELDS] for row in p.rows], np.uint64).reshape(-1, 6))
    experts = aligned(np.array(p.experts, np.int32))
    pairs = sum(len(tokens_of(p.ids, p.weights, e)[0]) for e in p.experts)
    if combine == "exact":
        out = aligned(np.full((pairs, hidden), 0x7FFF if p.shape.dtype == "bfloat16" else np.nan, p.shape.activation_dtype))
    else:
        out = aligned(np.full((tokens, hidden), np.nan, np.float32) if accumulate_onto is None else accumulate_onto)
    backend.call(
        HostStream(), tokens, address(p.x), address(p.ids), address(p.weights), address(experts), address(table), len(p.experts), address(out),
        combine, accumulate=accumulate_onto is not None,
    )  # fmt: skip
    backend.check()
    return out


def as_float(array: Any) -> Any:
    return bfloat16_bits_to_float32(array) if array.dtype == np.uint16 else array


def assert_close(got: Any, expected: Any, shape: FfnShape) -> None:
    """float32: relative error of sums. bfloat16: rounding steps may fall the other way, few do."""
    got, expected = as_float(got), as_float(expected)
    assert np.isfinite(got).all()
    scale = np.sqrt(np.mean(expected.astype(np.float64) ** 2))
    error = np.abs(got - expected) / scale
    if (shape.numerics, shape.dtype) == ("weights-only", "float32"):
        assert np.sqrt(np.mean(error**2)) < 1e-6
        assert error.max() < 1e-5
    elif shape.dtype == "float32":  # a last bit of `a` may be another E4M3
        assert np.mean(error > 5e-6) < 2e-2
        assert error.max() < 0.05
    else:
        assert np.mean(error > 1e-6) < 2e-2
        assert error.max() < 0.05


def make(limits: Limits, folder: Path, shape: FfnShape, max_tokens: int, top_k: int, num_experts: int) -> CudaBackend:
    return CudaBackend(HostCard(limits, folder), shape, max_tokens, top_k, num_experts, folder)


@pytest.mark.parametrize(("numerics", "dtype"), ALL_NUMERICS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 64), (96, 32), (512, 288)])
def test_one_token(folder: Path, numerics: Numerics, dtype: Dtype, hidden: int, intermediate: int) -> None:
    p = problem(numerics, dtype, hidden, intermediate, 1, 4, 8, [])
    p.experts = sorted(int(i) for i in p.ids[0])[:3]
    p.rows = [random_row(np.random.default_rng(5 + e), p.shape, 116, 122) for e in p.experts]
    backend = make(HOPPER, folder, p.shape, 1, 4, 8)
    assert_close(compute(backend, p), p.expected(), p.shape)
    assert_close(compute(backend, p, "exact"), p.expected("exact"), p.shape)


@pytest.mark.parametrize(("numerics", "dtype"), ALL_NUMERICS)
@pytest.mark.parametrize(("limits", "hidden", "intermediate"), [(HOPPER, 256, 128), (TURING, 96, 160)])
def test_many_tokens(folder: Path, numerics: Numerics, dtype: Dtype, limits: Limits, hidden: int, intermediate: int) -> None:
    held = [1, 2, 4, 7]
    p = problem(numerics, dtype, hidden, intermediate, 37, 3, 8, held)
    backend = make(limits, folder, p.shape, 40, 3, 8)
    assert_close(compute(backend, p), p.expected(), p.shape)
    assert_close(compute(backend, p, "exact"), p.expected("exact"), p.shape)
