"""Time of the CPU kernels over more packed rows than any cache holds, beside a plain vector read of as many bytes.

A round times, in turn, the read and every contender; each takes the next rows of the set, so that what it touches left
the caches long ago. A ratio is the median over rounds of contender / read in that round: both saw the same minute of
the machine. `busy_ratio` is the same of CPU time, which other processes disturb less. The peak is what vector multiply-adds on
registers reach with the backend's own instruction set, for other backends with the best one here, in the same rounds.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from evrun.kernels import native, registry
from evrun.kernels.api import U8, CpuBackend, Dtype, FfnShape, Numerics, Row

Memory = Literal["anonymous", "mapped"]

TOKENS = (1, 4, 8, 16, 32, 64, 128, 256)
LEAST_BYTES = 900_000_000
TIMES_THE_CACHES = 4
"""Rows take at least LEAST_BYTES, and this many times what the largest cache holds."""
EXPERTS_OF_A_CALL = 6
SCALES = (117, 123)
"""2^-10 to 2^-4."""
PEAK_STEPS = 40_000_000
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


MakePeer = Callable[[Work, int, int, Sequence[Row]], CpuBackend]
"""(work, most tokens, threads, every row that will be asked for) -> what is timed beside the native kernel."""


@dataclass
class _Contender:
    name: str
    tokens: int
    threads: int
    backend: CpuBackend
    slow: bool = False
    """Timed on a single expert a round."""
    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    """Of one expert, a round each; wall and CPU time."""

    def time(self, experts: int, action: Callable[[], object]) -> None:
        wall, busy = time.perf_counter(), time.process_time()
        action()
        self.busy.append((time.process_time() - busy) / experts)
        self.seconds.append((time.perf_counter() - wall) / experts)


def run(
    work: Work | None = None,
    tokens: Sequence[int] = TOKENS,
    threads: Sequence[int] = (1,),
    rounds: int = 10,
    memory: Sequence[Memory] = ("anonymous",),
    least_bytes: int | None = None,
    variants: Sequence[str] | None = None,
    baseline: bool = True,
    peers: Mapping[str, MakePeer] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Rows for `evrun bench kernel`, one a (memory, threads, tokens, backend).

    tokens      tokens that use each expert; a call has six experts
    threads     of one backend; the torch baseline always has one
    memory      `mapped`: a file in the page cache, as a worker sees a checkpoint
    least_bytes of rows; default: LEAST_BYTES, more where the caches are large
    variants    of the native kernel; default: the fastest here by its own measurement
    baseline    time the torch reference as well: it expands the codes and multiplies
    peers       other contenders by name
    Every row: backend, tokens, threads, world, memory, numerics, dtype; seconds (median, one expert), bytes (one expert,
    packed), gb_per_s, gflop_per_s, peak_gflop_per_s (all threads), floor_seconds, ratio, busy_ratio, rounds.
    Raises NativeLibraryError.
    """
    work = work or Work()
    variants = list(variants) if variants is not None else [native.measure()]
    rows = []
    for kind in memory:
        packed = _Packed(work, least_bytes if least_bytes is not None else max(LEAST_BYTES, TIMES_THE_CACHES * largest_cache_bytes()), kind)
        for count in threads:
            made: list[tuple[str, CpuBackend, bool]] = [
                (f"native-{v}", native.create(work.shape, max(tokens), EXPERTS_OF_A_CALL, count, variant=v), False) for v in variants
            ]
            made += [(name, make(work, max(tokens), count, packed.rows), False) for name, make in (peers or {}).items()]
            if baseline and count == 1:
                torch = registry.module(BASELINE).create(work.shape, max(tokens), EXPERTS_OF_A_CALL, 1)
                made.append((torch.name, torch, True))
            contenders = [_Contender(name, t, count, backend, slow) for name, backend, slow in made for t in tokens]
            progress(f"{kind} memory, {count} threads: {rounds} rounds of {len(contenders)} contenders")
            rows += _measure(work, packed, count, rounds, contenders)
    return rows


def largest_cache_bytes() -> int:
    """As the kernel tells it; 0 where it does not."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.removesuffix("K")) * 1024 for size in sizes if size.endswith("K")), default=0)


def _measure(work: Work, packed: _Packed, threads: int, rounds: int, contenders: Sequence[_Contender]) -> list[dict[str, Any]]:
    reader = native.create(work.shape, 1, 1, threads)
    floor = _Contender("read", 0, threads, reader)
    machines = {c.backend.name: c.backend for c in contenders if isinstance(c.backend, native.NativeBackend)}
    peaks: dict[str, list[float]] = {name: [] for name in (reader.name, *machines)}
    calls = {c.tokens: _Call(work, c.tokens) for c in contenders}
    experts = len(packed.rows)
    for _ in range(rounds):
        floor.time(experts, lambda: reader.read(packed.stretches))
        for name, gflop_per_s in peaks.items():
            gflop_per_s.append(_peak(machines.get(name, reader)))
        for c in contenders:
            size = 1 if c.slow else EXPERTS_OF_A_CALL
            groups = [packed.take(size) for _ in range(1 if c.slow else max(1, experts // c.tokens // size))]
            c.time(size * len(groups), functools.partial(calls[c.tokens].run_all, c.backend, groups))
    floor_seconds = statistics.median(floor.seconds)
    return [
        {
            "backend": c.name,
            "tokens": c.tokens,
            "threads": c.threads,
            "world": 1,
            "memory": packed.kind,
            "numerics": work.numerics,
            "dtype": work.dtype,
            "seconds": (seconds := statistics.median(c.seconds)),
            "bytes": work.row_bytes,
            "gb_per_s": work.row_bytes / seconds / 1e9,
            "gflop_per_s": 6 * work.hidden * work.intermediate * c.tokens / seconds / 1e9,
            "peak_gflop_per_s": statistics.median(peaks[c.name if c.name in peaks else reader.name]),
            "floor_seconds": floor_seconds,
            "ratio": _ratio(c.seconds, floor.seconds),
            "busy_ratio": _ratio(c.busy, floor.busy),
            "rounds": rounds,
        }
        for c in contenders
    ]


def _peak(backend: native.NativeBackend) -> float:
    start = time.perf_counter()
    return backend.multiply_add(PEAK_STEPS) / (time.perf_counter() - start) / 1e9


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
