"""Kernel times on a card, each beside the floor measured in the same run.

    python tests/bench/gpu_kernels.py truth FILE.npz   what the torch reference gives for full-size rows (needs no card)
    python tests/bench/gpu_kernels.py check FILE.npz   every kernel against that
    python tests/bench/gpu_kernels.py time OUT.json    medians of device events, rotating over more than 1 GiB of rows

Rows have the geometry of DeepSeek-V4.1-Flash and random codes. A figure is the median over graph launches of the time
of one call; every call of a graph reads other rows than the one before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evrun.kernels import cuda
from evrun.kernels.api import Combine, FfnShape, Row
from evrun.kernels.cuda import nvrtc
from evrun.kernels.cuda.backend import CudaBackend
from evrun.kernels.cuda.driver import Stream, driver_version
from evrun.kernels.formats import float32_to_bfloat16_bits

HIDDEN, INTERMEDIATE, TOP_K, LIMIT = 5120, 2304, 6, 10.0
SLOTS = 128
DISTINCT = 8
BF16_PEAK = 790e12
"""Flop/s of an 8192^3 bf16 product on an H200, measured once."""


def shape_of(numerics: str = "reference", dtype: str = "bfloat16") -> FfnShape:
    return FfnShape(HIDDEN, INTERMEDIATE, LIMIT, numerics, dtype)  # type: ignore[arg-type]


PARTS = (
    (INTERMEDIATE, HIDDEN // 2), (INTERMEDIATE, HIDDEN // 32), (INTERMEDIATE, HIDDEN // 2), (INTERMEDIATE, HIDDEN // 32),
    (HIDDEN, INTERMEDIATE // 2), (HIDDEN, INTERMEDIATE // 32),
)  # fmt: skip
OFFSETS = np.cumsum([0, *(a * b for a, b in PARTS)])
ROW_BYTES = int(OFFSETS[-1])


def random_rows(seed: int = 1) -> list[Row]:
    """DISTINCT rows: any code, scales around 2^-7."""
    random = np.random.default_rng(seed)

    def part(index: int) -> Any:
        if index % 2:
            return random.integers(118, 124, PARTS[index], dtype=np.uint8)
        return np.frombuffer(random.bytes(PARTS[index][0] * PARTS[index][1]), np.uint8).reshape(PARTS[index])

    return [Row(*map(part, range(6))) for _ in range(DISTINCT)]


class Table(NamedTuple):
    """Addresses of rows, [n, 6], on the host and on the card."""

    rows: Any
    address: int


class Rows:
    """SLOTS experts on the card; slot s holds row s % DISTINCT."""

    def __init__(self, device: cuda.CompilingDevice, stream: Stream) -> None:
        self.memory = device.allocate(SLOTS * ROW_BYTES)
        for i, row in enumerate(random_rows()):
            flat = np.concatenate([part.reshape(-1) for part in row])
            device.copy_in(self.address(i), flat.ctypes.data, ROW_BYTES, stream)
            for slot in range(i + DISTINCT, SLOTS, DISTINCT):
                device.copy(self.address(slot), self.address(i), ROW_BYTES, stream)
            stream.synchronize()

    def address(self, slot: int) -> int:
        return self.memory.address + slot * ROW_BYTES

    def table(self, device: cuda.CompilingDevice, stream: Stream, slots: Iterable[int]) -> Table:
        rows = np.array([[self.address(s) + int(o) for o in OFFSETS[:6]] for s in slots], np.uint64)
        return Table(rows, upload(device, stream, rows))


class Inputs:
    """Arguments of a call."""

    def __init__(self, tokens: int, dtype: str, experts: int, seed: int = 2) -> None:
        random = np.random.default_rng(seed)
        x = random.standard_normal((tokens, HIDDEN)).astype(np.float32)
        self.x = float32_to_bfloat16_bits(x) if dtype == "bfloat16" else x
        self.ids = draw_ids(tokens, experts).astype(np.int32)
        self.weights = random.uniform(0.1, 0.5, self.ids.shape).astype(np.float32)
        self.experts = np.arange(experts, dtype=np.int32)
        self.addresses: list[int] = []

    def upload(self, device: cuda.CompilingDevice, stream: Stream) -> None:
        self.addresses = [upload(device, stream, array) for array in (self.x, self.ids, self.weights, self.experts)]


def upload(device: cuda.CompilingDevice, stream: Stream, array: Any) -> int:
    memory = device.allocate(array.nbytes)
    device.copy_in(memory.address, array.ctypes.data, array.nbytes, stream)
    stream.synchronize()
    _KEPT.append(memory)
    return memory.address


_KEPT: list[Any] = []


def draw_ids(tokens: int, experts: int, seed: int = 3) -> Any:
    """[tokens, 6] distinct ids below `experts`; with fewer than 6 experts the rest belong to other ranks."""
    random = np.random.default_rng(seed)
    if experts <= TOP_K:
        return np.tile(np.arange(TOP_K), (tokens, 1))
    return np.argsort(random.random((tokens, experts)), axis=1)[:, :TOP_K]


def copy_rate(device: cuda.CompilingDevice, stream: Stream) -> float:
    """Bytes read and written per second by a large copy on the card."""
    size = 1 << 30
    a, b = device.allocate(size), device.allocate(size)
    device.fill(a.address, 1, size, stream)
    times = []
    for _ in range(12):
        start, end = device.event(timing=True), device.event(timing=True)
        start.record(stream)
        for _ in range(4):
            device.copy(b.address, a.address, size, stream)
        end.record(stream)
        end.synchronize()
        times.append(end.milliseconds_since(start) / 4e3)
    a.close()
    b.close()
    return 2 * size / statistics.median(times)


def call(
    device: cuda.CompilingDevice, stream: Stream, backend: CudaBackend, inputs: Inputs, table: Table, experts: int, out: int,
    combine: Combine = "partial",
) -> None:  # fmt: skip
    """One call of either kind. Of one token the experts are those below `experts`."""
    if len(inputs.x) == 1 and backend.single:
        backend.call_single(stream, inputs.addresses[0], table.rows, inputs.weights[0, :experts].tolist(), out, combine)
    else:
        backend.call(stream, len(inputs.x), *inputs.addresses, table.address, experts, out, combine)


def time_calls(
    device: cuda.CompilingDevice, stream: Stream, backend: CudaBackend, inputs: Inputs, tables: Sequence[Table], experts: int, out: int,
    combine: Combine = "partial", graph: bool = True, repeats: int = 15,
) -> float:  # fmt: skip
    """Seconds of one call: the median over `repeats` rounds, each a call per table."""

    def calls() -> None:
        for table in tables:
            call(device, stream, backend, inputs, table, experts, out, combine)

    calls()
    stream.synchronize()
    if graph:
        with device.capture(stream) as captured:
            calls()
    times = []
    for _ in range(repeats):
        start, end = device.event(timing=True), device.event(timing=True)
        start.record(stream)
        if graph:
            captured.launch(stream)
        else:
            calls()
        end.record(stream)
        end.synchronize()
        times.append(end.milliseconds_since(start) / 1e3 / len(tables))
    backend.check()
    return statistics.median(times)


def measure(device: cuda.CompilingDevice, cases: Sequence[tuple[int, int, str, str]], cache: Path) -> list[dict[str, Any]]:
    """A row of the result for every (tokens, resident experts of the call, numerics, dtype)."""
    stream = device.stream()
    rows = Rows(device, stream)
    rate = copy_rate(device, stream)
    say(f"copy on the card: {rate / 1e12:.2f} TB/s")
    results = []
    for tokens, experts, numerics, dtype in cases:
        shape = shape_of(numerics, dtype)
        backend = cuda.create_on(device, shape, tokens, TOP_K, cache, 384)
        inputs = Inputs(tokens, dtype, experts)
        inputs.upload(device, stream)
        used = len(np.intersect1d(np.unique(inputs.ids), inputs.experts))
        sets = max(1, SLOTS // experts)
        tables = [rows.table(device, stream, range(s * experts, (s + 1) * experts)) for s in range(sets)]
        out = device.allocate(tokens * HIDDEN * 4)
        seconds = time_calls(device, stream, backend, inputs, tables, experts, out.address)
        pairs = int(np.isin(inputs.ids, inputs.experts).sum())
        size, flops = used * ROW_BYTES, pairs * 6 * HIDDEN * INTERMEDIATE
        floor = max(size / rate, flops / BF16_PEAK)
        result = {
            "backend": backend.name, "tokens": tokens, "experts": used, "numerics": numerics, "dtype": dtype,
            "seconds": seconds, "bytes": size,
            "gb_per_s": size / seconds / 1e9, "tflop_per_s": flops / seconds / 1e12, "floor_seconds": floor, "ratio": seconds / floor,
        }  # fmt: skip
        if tokens == 1:
            result["seconds_launched_one_by_one"] = time_calls(device, stream, backend, inputs, tables, experts, out.address, graph=False)
        results.append(result)
        say(json.dumps(result))
        backend.close()
        out.close()
    return results


VARIANTS = (("reference", "bfloat16"), ("reference", "float32"), ("weights-only", "bfloat16"), ("weights-only", "float32"))
CHECKED = ((1, 6), (1, 1), (2, 8), (33, 8), (160, 8))
"""(tokens, experts) of the calls that are compared, on a few of their tokens."""


def some_of(tokens: int) -> Any:
    return np.unique(np.linspace(0, tokens - 1, 3).astype(int))


def truth() -> dict[str, Any]:
    """Reference results by case."""
    from evrun.kernels import reference

    host, results = random_rows(), {}
    for numerics, dtype in VARIANTS:
        backend = reference.create(shape_of(numerics, dtype), 160, TOP_K, 1)
        for tokens, experts in CHECKED:
            inputs, some = Inputs(tokens, dtype, experts), some_of(tokens)
            wanted = np.empty((len(some), HIDDEN), np.float32)
            rows = [host[e % DISTINCT] for e in range(experts)]
            backend.call(inputs.x[some], inputs.ids[some], inputs.weights[some], list(range(experts)), rows, wanted, "partial")
            results[f"{numerics} {dtype} {tokens} {experts}"] = wanted
    return results


def check(device: cuda.CompilingDevice, wanted: dict[str, Any], cache: Path) -> bool:
    """False if a difference is too large."""
    stream = device.stream()
    rows = Rows(device, stream)
    fine = True
    for numerics, dtype in VARIANTS:
        backend = cuda.create_on(device, shape_of(numerics, dtype), 160, TOP_K, cache, 384)
        for tokens, experts in CHECKED:
            inputs, some = Inputs(tokens, dtype, experts), some_of(tokens)
            inputs.upload(device, stream)
            out, got = device.allocate(tokens * HIDDEN * 4), np.empty((tokens, HIDDEN), np.float32)
            device.fill(out.address, 0xFF, got.nbytes, stream)
            call(device, stream, backend, inputs, rows.table(device, stream, range(experts)), experts, out.address)
            device.copy_out(got.ctypes.data, out.address, got.nbytes, stream)
            stream.synchronize()
            backend.check()
            expected = wanted[f"{numerics} {dtype} {tokens} {experts}"]
            error = float(np.linalg.norm(got[some] - expected) / np.linalg.norm(expected))
            allowed = 2e-6 if (numerics, dtype) == ("weights-only", "float32") else 1e-3
            fine = fine and error < allowed and bool(np.isfinite(got).all())
            say(
                f"{backend.name:10} {numerics:12} {dtype:8} T={tokens:<4} experts={experts}: relative error {error:.2e}, "
                f"differing {np.mean(got[some] != expected):.2%}"
            )
        backend.close()
    return fine


def say(line: str) -> None:
    sys.stderr.write(line + "\n")


CASES = [
    *((1, n, "reference", "bfloat16") for n in (1, 2, 6)),
    (1, 6, "reference", "float32"),
    (1, 6, "weights-only", "bfloat16"),
    *((t, 128, "reference", "bfloat16") for t in (4, 16, 64, 512, 4096)),
    (512, 128, "weights-only", "bfloat16"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["truth", "check", "time"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/evrun-cuda-cache"))
    arguments = parser.parse_args()
    if arguments.what == "truth":
        np.savez_compressed(arguments.file, **truth())
        return 0
    device = cuda.CompilingDevice()
    if arguments.what == "check":
        fine = check(device, dict(np.load(arguments.file)), arguments.cache)
        say("all within tolerance" if fine else "DIFFERENT")
        return 0 if fine else 1
    versions = {"driver": ".".join(map(str, driver_version())), "nvrtc": ".".join(map(str, nvrtc.load().version)), "numpy": np.__version__}
    result = {"bench": "kernel", "machine": device.name, "versions": versions, "rows": measure(device, CASES, arguments.cache)}
    arguments.file.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
