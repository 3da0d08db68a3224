"""Kernels of a card over full-size rows: device events over launches of a graph, rotating over more than 1 GiB of rows.

Rows have the geometry of DeepSeek-V4.1-Flash and random codes. A figure is the median over graph launches of the time
of one call; every call of a graph reads other rows than the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from evrun.bench import report
from evrun.kernels import cuda
from evrun.kernels.api import Combine, FfnShape, Row
from evrun.kernels.cuda.backend import CudaBackend
from evrun.kernels.formats import float32_to_bfloat16_bits

HIDDEN, INTERMEDIATE, TOP_K, LIMIT = 5120, 2304, 6, 10.0
SLOTS = 128
DISTINCT = 8
BF16_PEAK = 790e12
"""Flop/s of an 8192^3 bf16 product on an H200, measured once."""
PARTS = (
    (INTERMEDIATE, HIDDEN // 2), (INTERMEDIATE, HIDDEN // 32), (INTERMEDIATE, HIDDEN // 2), (INTERMEDIATE, HIDDEN // 32),
    (HIDDEN, INTERMEDIATE // 2), (HIDDEN, INTERMEDIATE // 32),
)  # fmt: skip
OFFSETS = np.cumsum([0, *(a * b for a, b in PARTS)])
ROW_BYTES = int(OFFSETS[-1])


class Case(NamedTuple):
    tokens: int
    experts: int
    """Of the call, all in card memory."""
    numerics: str = "reference"
    dtype: str = "bfloat16"


def shape_of(numerics: str = "reference", dtype: str = "bfloat16") -> FfnShape:
    return FfnShape(HIDDEN, INTERMEDIATE, LIMIT, numerics, dtype)  # type: ignore[arg-type]


def cases(tokens: Sequence[int]) -> list[Case]:
    """One token: what one rank, a rank of four with two experts, and with one has. More: 128 experts."""
    found: list[Case] = []
    for count in tokens:
        found += [Case(1, n) for n in (1, 2, TOP_K)] if count == 1 else [Case(count, SLOTS)]
    return found


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


class Card:
    """A card with SLOTS experts in its memory; slot s holds row s % DISTINCT. What is uploaded stays until `close`."""

    def __init__(self, device: cuda.CompilingDevice, rows: Sequence[Row]) -> None:
        self.device, self.stream = device, device.stream()
        self._held = [device.allocate(SLOTS * ROW_BYTES)]
        for i, row in enumerate(rows):
            flat = np.concatenate([part.reshape(-1) for part in row])
            device.copy_in(self._slot(i), flat.ctypes.data, ROW_BYTES, self.stream)
            for slot in range(i + DISTINCT, SLOTS, DISTINCT):
                device.copy(self._slot(slot), self._slot(i), ROW_BYTES, self.stream)
            self.stream.synchronize()

    def table(self, slots: Iterable[int]) -> Table:
        rows = np.array([[self._slot(s) + int(o) for o in OFFSETS[:6]] for s in slots], np.uint64)
        return Table(rows, self.upload(rows))

    def upload(self, array: Any) -> int:
        memory = self.device.allocate(array.nbytes)
        self._held.append(memory)
        self.device.copy_in(memory.address, array.ctypes.data, array.nbytes, self.stream)
        self.stream.synchronize()
        return memory.address

    def copy_rate(self) -> float:
        """Bytes read and written per second by a large copy on the card."""
        size, device, stream = 1 << 30, self.device, self.stream
        a, b = device.allocate(size), device.allocate(size)
        device.fill(a.address, 1, size, stream)
        seconds = self._timed(lambda: device.copy(b.address, a.address, size, stream), 4, 12)
        a.close()
        b.close()
        return 2 * size / seconds

    def seconds(
        self, backend: CudaBackend, inputs: Inputs, tables: Sequence[Table], experts: int, out: int, combine: Combine = "partial",
        graph: bool = True,
    ) -> float:  # fmt: skip
        """Of one call: the median over rounds of a call per table."""

        def calls() -> None:
            for table in tables:
                call(self, backend, inputs, table, experts, out, combine)

        calls()
        self.stream.synchronize()
        if not graph:
            seconds = self._timed(calls, 1, 15)
        else:
            with self.device.capture(self.stream) as captured:
                calls()
            seconds = self._timed(lambda: captured.launch(self.stream), 1, 15)
            captured.close()
        backend.check()
        return seconds / len(tables)

    def _timed(self, work: Any, times: int, rounds: int) -> float:
        """Median seconds of `work` by device events."""
        seconds = []
        start, end = self.device.event(timing=True), self.device.event(timing=True)
        for _ in range(rounds):
            start.record(self.stream)
            for _ in range(times):
                work()
            end.record(self.stream)
            end.synchronize()
            seconds.append(end.milliseconds_since(start) / 1e3 / times)
        return median(seconds)

    def close(self) -> None:
        for memory in self._held:
            memory.close()
        self.stream.close()

    def _slot(self, slot: int) -> int:
        return int(self._held[0].address) + slot * ROW_BYTES


class Inputs:
    """Arguments of a call, on the host and, at `addresses`, on the card: x, ids, weights, experts."""

    def __init__(self, card: Card, tokens: int, dtype: str, experts: int, seed: int = 2) -> None:
        random = np.random.default_rng(seed)
        x = random.standard_normal((tokens, HIDDEN)).astype(np.float32)
        self.x = float32_to_bfloat16_bits(x) if dtype == "bfloat16" else x
        self.ids = draw_ids(tokens, experts).astype(np.int32)
        self.weights = random.uniform(0.1, 0.5, self.ids.shape).astype(np.float32)
        self.experts = np.arange(experts, dtype=np.int32)
        self.addresses = [card.upload(array) for array in (self.x, self.ids, self.weights, self.experts)]


def draw_ids(tokens: int, experts: int, seed: int = 3) -> Any:
    """[tokens, 6] distinct ids below `experts`; with fewer than 6 experts the rest belong to other ranks."""
    random = np.random.default_rng(seed)
    if experts <= TOP_K:
        return np.tile(np.arange(TOP_K), (tokens, 1))
    return np.argsort(random.random((tokens, experts)), axis=1)[:, :TOP_K]


def call(card: Card, backend: CudaBackend, inputs: Inputs, table: Table, experts: int, out: int, combine: Combine = "partial") -> None:
    """One call of either kind. Of one token the experts are those below `experts`."""
    if len(inputs.x) == 1 and backend.single:
        backend.call_single(card.stream, inputs.addresses[0], table.rows, inputs.weights[0, :experts].tolist(), out, combine)
    else:
        x, ids, weights, numbers = inputs.addresses
        backend.call(card.stream, len(inputs.x), x, ids, weights, numbers, table.address, experts, out, combine)


def run(device: cuda.CompilingDevice, wanted: Sequence[Case], cache: Path, kernels: Any = cuda) -> list[report.Row]:
    """A row of the result per case, by a sibling of `kernels.registry.card_module` and its own device.

    Floor: the bytes of the rows at the rate of a copy on the card, or the operations at BF16_PEAK, whichever is longer.
    Raises DeviceError, CompileError.
    """
    card = Card(device, random_rows())
    rate = card.copy_rate()
    rows: list[report.Row] = []
    for case in wanted:
        backend = kernels.create_on(device, shape_of(case.numerics, case.dtype), case.tokens, TOP_K, cache, 384)
        inputs = Inputs(card, case.tokens, case.dtype, case.experts)
        used = len(np.intersect1d(np.unique(inputs.ids), inputs.experts))
        sets = max(1, SLOTS // case.experts)
        tables = [card.table(range(s * case.experts, (s + 1) * case.experts)) for s in range(sets)]
        out = device.allocate(case.tokens * HIDDEN * 4)
        seconds = card.seconds(backend, inputs, tables, case.experts, out.address)
        pairs = int(np.isin(inputs.ids, inputs.experts).sum())
        size, flops = used * ROW_BYTES, pairs * 6 * HIDDEN * INTERMEDIATE
        floor = max(size / rate, flops / BF16_PEAK)
        row: report.Row = {
            "backend": backend.name, "tokens": case.tokens, "experts": used, "numerics": case.numerics, "dtype": case.dtype,
            "seconds": seconds, "bytes": size, "gb_per_s": size / seconds / 1e9, "tflop_per_s": flops / seconds / 1e12,
            "floor_seconds": floor, "ratio": seconds / floor,
        }  # fmt: skip
        if case.tokens == 1:
            row["seconds_one_by_one"] = card.seconds(backend, inputs, tables, case.experts, out.address, graph=False)
        rows.append(row)
        backend.close()
        out.close()
    card.close()
    return rows
