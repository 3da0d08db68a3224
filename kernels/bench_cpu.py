"""Time of the CPU kernels over more packed rows than any cache holds, beside a plain vector read of as many bytes.

A round times, in turn, the read and every contender; each takes the next rows of the set, so that what it touches left
the caches long ago. A ratio is the median over rounds of contender / read in that round: both saw the same minute of
the machine. `busy_ratio` is the same of CPU time, which other processes disturb less.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from evrun.kernels import native, registry
from evrun.kernels.api import U8, CpuBackend, Dtype, FfnShape, Numerics, Row

Memory = Literal["anonymous", "mapped"]

TOKENS = (1, 4, 8, 16, 32, 64, 128, 256)
LEAST_BYTES = 900_000_000
EXPERTS_OF_A_CALL = 6
SCALES = (117, 123)
"""2^-10 to 2^-4."""
BASELINE = "torch"
BASELINE_EXPERTS = 1


@dataclass(frozen=True)
class Work:
    """What is measured; the release's expert by default."""

    hidden: int = 5120
    intermediate: int = 2304
    swiglu_limit: float = 10.0
    numerics: Numerics = "reference"
    dtype: Dtype = "bfloat16"

    @property
    def shape(self) -> FfnShape:
        return FfnShape(self.hidden, self.intermediate, self.swiglu_limit, self.numerics, self.dtype)

    @property
    def row_bytes(self) -> int:
        return 3 * self.hidden * self.intermediate // 2 + 3 * self.hidden * self.intermediate // 32


@dataclass
class Sample:
    seconds: list[float]
    busy: list[float]
    """Per expert; wall and CPU time."""


def run(
    work: Work | None = None,
    tokens: Sequence[int] = TOKENS,
    threads: Sequence[int] = (1,),
    rounds: int = 10,
    memory: Sequence[Memory] = ("anonymous",),
    least_bytes: int = LEAST_BYTES,
    variants: Sequence[str] | None = None,
    baseline: bool = True,
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Rows for `evrun bench kernel`, one a (memory, threads, tokens, backend).

    tokens      tokens that use each expert; a call has six experts
    threads     of one backend; the torch baseline always has one
    memory      `mapped`: a file in the page cache, as a worker sees a checkpoint
    variants    of the native kernel; default: the fastest here by its own measurement
    Every row: backend, tokens, threads, world, memory, numerics, dtype; seconds (median, one expert), bytes (one expert,
    packed), gb_per_s, gflop_per_s, floor_seconds, ratio, busy_ratio, rounds.
    Raises NativeLibraryError.
    """
    work = work or Work()
    variants = list(variants) if variants is not None else [native.measure()]
    rows = []
    for kind in memory:
        packed = _Packed(work, least_bytes, kind)
        for count in threads:
            contenders: list[tuple[str, int, CpuBackend]] = [
                (f"native-{v}", t, native.create(work.shape, t, EXPERTS_OF_A_CALL, count, variant=v)) for v in variants for t in tokens
            ]
            if baseline and count == 1:
                torch = registry.module(BASELINE).create(work.shape, max(tokens), EXPERTS_OF_A_CALL, 1)
                contenders += [(torch.name, t, torch) for t in tokens]
            progress(f"{kind} memory, {count} threads: {rounds} rounds of {len(contenders)} contenders")
            rows += _measure(work, packed, count, rounds, contenders)
    return rows


def _measure(
    work: Work, packed: _Packed, threads: int, rounds: int, contenders: Sequence[tuple[str, int, CpuBackend]]
) -> list[dict[str, Any]]:
    reader = native.create(work.shape, 1, 1, threads)
    floor = Sample([], [])
    samples = {(name, t): Sample([], []) for name, t, _ in contenders}
    calls = {t: _Call(work, t) for _, t, _ in contenders}
    for _ in range(rounds):
        experts = len(packed.rows)
        _time(floor, experts, lambda: reader.read(packed.stretches))
        for name, t, backend in contenders:
            count = BASELINE_EXPERTS if not isinstance(backend, native.NativeBackend) else max(EXPERTS_OF_A_CALL, experts // t)
            groups = [packed.take(min(EXPERTS_OF_A_CALL, count)) for _ in range(max(1, count // EXPERTS_OF_A_CALL))]
            _time(samples[name, t], sum(map(len, groups)), functools.partial(calls[t].run_all, backend, groups))
    floor_seconds = statistics.median(floor.seconds)
    return [
        {
            "backend": name,
            "tokens": t,
            "threads": threads if isinstance(backend, native.NativeBackend) else 1,
            "world": 1,
            "memory": packed.kind,
            "numerics": work.numerics,
            "dtype": work.dtype,
            "seconds": (seconds := statistics.median(samples[name, t].seconds)),
            "bytes": work.row_bytes,
            "gb_per_s": work.row_bytes / seconds / 1e9,
            "gflop_per_s": 6 * work.hidden * work.intermediate * t / seconds / 1e9,
            "floor_seconds": floor_seconds,
            "ratio": _ratio(samples[name, t].seconds, floor.seconds),
            "busy_ratio": _ratio(samples[name, t].busy, floor.busy),
            "rounds": rounds,
        }
        for name, t, backend in contenders
    ]


def _time(sample: Sample, experts: int, action: Callable[[], object]) -> None:
    wall, busy = time.perf_counter(), time.process_time()
    action()
    sample.busy.append((time.process_time() - busy) / experts)
    sample.seconds.append((time.perf_counter() - wall) / experts)


def _ratio(times: Sequence[float], floors: Sequence[float]) -> float:
    return statistics.median(t / f for t, f in zip(times, floors, strict=True))


class _Call:
    """One layer call of `tokens` tokens that all use the same experts."""

    def __init__(self, work: Work, tokens: int) -> None:
        rng = np.random.default_rng(tokens)
        x = rng.standard_normal((tokens, work.hidden)).astype(np.float32)
        self._x = (x.view(np.uint32) >> 16).astype(np.uint16) if work.dtype == "bfloat16" else x
        self._weights = np.full((tokens, EXPERTS_OF_A_CALL), 0.25, np.float32)
        self._out = np.empty((tokens, work.hidden), np.float32)

    def run_all(self, backend: CpuBackend, groups: Sequence[Sequence[Row]]) -> None:
        for rows in groups:
            self.run(backend, rows)

    def run(self, backend: CpuBackend, rows: Sequence[Row]) -> None:
        experts = list(range(len(rows)))
        ids = np.tile(np.arange(len(rows), dtype=np.int32), (len(self._x), 1))
        backend.call(self._x, ids, np.ascontiguousarray(self._weights[:, : len(rows)]), experts, rows, self._out, "partial")


class _Packed:
    """Experts with random codes in one stretch of memory, handed out round and round."""

    def __init__(self, work: Work, least_bytes: int, kind: Memory) -> None:
        self.kind = kind
        row_bytes = work.row_bytes
        experts = -(-least_bytes // (row_bytes * EXPERTS_OF_A_CALL)) * EXPERTS_OF_A_CALL
        memory = _reserve(experts * row_bytes, kind)
        rng = np.random.default_rng(0)
        pattern = rng.integers(0, 256, 1 << 22, dtype=np.uint8)
        for start in range(0, memory.size, pattern.size):
            memory[start : start + pattern.size] = pattern[: memory.size - start]
        self.rows = [_row(memory[i * row_bytes : (i + 1) * row_bytes], work, rng) for i in range(experts)]
        self.stretches = [memory[i * row_bytes : (i + 1) * row_bytes] for i in range(experts)]
        self._next: Iterator[Row] = itertools.cycle(self.rows)

    def take(self, count: int) -> list[Row]:
        return list(itertools.islice(self._next, count))


def _row(part: U8, work: Work, rng: np.random.Generator) -> Row:
    arrays = []
    start = 0
    h, i = work.hidden, work.intermediate
    for n, k in ((i, h // 2), (i, h // 32), (i, h // 2), (i, h // 32), (h, i // 2), (h, i // 32)):
        array = part[start : start + n * k].reshape(n, k)
        if k * 16 in (h // 2, i // 2):
            array[:] = rng.integers(SCALES[0], SCALES[1] + 1, array.shape, dtype=np.uint8)
        arrays.append(array)
        start += n * k
    return Row(*arrays)


def _reserve(size: int, kind: Memory) -> npt.NDArray[np.uint8]:
    if kind == "anonymous":
        return np.empty(size, np.uint8)
    with tempfile.NamedTemporaryFile(prefix="evrun-bench-", dir=Path(tempfile.gettempdir())) as file:
        file.truncate(size)
        return np.memmap(file.name, np.uint8, "r+", shape=(size,))
