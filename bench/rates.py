"""The rates that `evrun doctor` predicts from, measured in some seconds: `python -m evrun.bench.rates WANTED.json` prints them."""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from evrun.bench import card_rate, dense_rate
from evrun.bench.herd import herd
from evrun.expert_worker.wire.checkpoint.config import ModelConfig, load_config
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.kernels import registry, self_test
from evrun.kernels.api import CpuBackend, FfnShape, Row
from evrun.launch.doctor.examine import release_config
from evrun.launch.doctor.rates import Rate, Rates, Wanted
from evrun.launch.doctor.residency import resident_pages
from evrun.launch.export.checkpoint import write_checkpoint
from evrun.launch.export.geometry import make_config, values

LEAST_BYTES = 300_000_000
"""Of rows, so that no cache keeps them."""
MOST_ROWS = 600
"""Of a toy geometry, whose rows caches keep in a run as well."""
PASSES = (4, 32)
CALLS, WARM_UP = 200, 50


def measure(wanted: Wanted) -> Rates:
    """Raises EvrunError."""
    started = time.monotonic()
    os.sched_setaffinity(0, wanted.worker_cpus or wanted.coordinator_cpus)
    config = load_config(wanted.checkpoint) if wanted.checkpoint else release_config()
    shape = FfnShape(
        config.hidden_size,
        config.moe_intermediate_size,
        config.swiglu_limit,
        "reference" if wanted.numerics == "reference" else "weights-only",
        "bfloat16" if wanted.dtype == "bfloat16" else "float32",
    )
    experts = cpu_experts(shape, config.num_experts_per_tok, wanted.cpu_kernel, wanted.worker_cpus) if wanted.worker_cpus else None
    cold, source = cold_rows(wanted.checkpoint, wanted.cold_bytes) if wanted.cold_bytes else (None, "not needed")
    copied = copy_rate()
    cards, failed = card_rate.measure_all(wanted, shape, config)
    os.sched_setaffinity(0, wanted.coordinator_cpus)
    call_s = empty_call(config, wanted)
    dense = dense_rate.measure(config, wanted.numerics, wanted.dtype, wanted.dense_dtype, wanted.context, wanted.coordinator_threads)
    return Rates(
        len(wanted.worker_cpus), experts, dense["attention"], dense["shared"], dense["head"], call_s, copied, cold, source, cards, failed,
        time.monotonic() - started,
    )  # fmt: skip


def cpu_experts(shape: FfnShape, top_k: int, kernel: str, cpus: Sequence[int]) -> Rate:
    """The CPU kernel over rows that no cache holds, with all worker cores at once."""
    name, _, variant = kernel.partition("-")
    backend = registry.create(name, shape, max(PASSES), top_k, len(cpus), cpus, variant or None)
    one = self_test.random_row(shape)
    row_bytes = sum(part.nbytes for part in one)
    count = -(-min(LEAST_BYTES // row_bytes, MOST_ROWS) // top_k) * top_k
    rows = [Row(*(part.copy() for part in one)) for _ in range(count)]
    singles, few, many = (_seconds_a_row(backend, shape, rows, top_k, tokens) for tokens in (1, *PASSES))
    return Rate.fit(row_bytes, singles, (PASSES[0], few), (PASSES[1], many))


def _seconds_a_row(backend: CpuBackend, shape: FfnShape, rows: Sequence[Row], top_k: int, tokens: int) -> float:
    """Median over calls of `top_k` rows; every token draws them all. Many tokens: fewer calls."""
    x = np.full((tokens, shape.hidden), 0x3F80 if shape.dtype == "bfloat16" else 1, shape.activation_dtype)
    ids, weights = np.tile(np.arange(top_k, dtype=np.int32), (tokens, 1)), np.full((tokens, top_k), 0.25, np.float32)
    out = np.empty((tokens, shape.hidden), np.float32)
    laps = []
    for start in range(0, len(rows) if tokens < PASSES[1] else 2 * top_k, top_k):
        before = time.perf_counter()
        backend.call(x, ids, weights, list(range(top_k)), rows[start : start + top_k], out, "partial")
        laps.append((time.perf_counter() - before) / top_k)
    return float(np.median(laps))


def copy_rate() -> float:
    """Activations and results through shared memory."""
    source, to = np.ones(1 << 24, np.uint8), np.empty(1 << 24, np.uint8)
    return source.nbytes / _best(lambda: np.copyto(to, source))


def _best(action: Callable[[], object], rounds: int = 5) -> float:
    laps = []
    for _ in range(rounds):
        before = time.perf_counter()
        action()
        laps.append(time.perf_counter() - before)
    return min(laps)


def empty_call(config: ModelConfig, wanted: Wanted) -> float:
    """A layer call of one token to `world` processes that compute nothing, on the cores of the plan."""
    import torch

    torch.set_num_threads(1)
    tiny = {"moe_intermediate_size": 32, "num_hidden_layers": 3, "engram_layer_ids": (), "n_routed_experts": config.n_routed_experts}
    geometry = make_config(values("tiny", num_experts_per_tok=config.num_experts_per_tok, hidden_size=config.hidden_size, **tiny), 1)
    cpus = wanted.worker_cpus or wanted.coordinator_cpus
    with tempfile.TemporaryDirectory(prefix="evrun-doctor-") as folder:
        write_checkpoint(geometry, Path(folder) / "c")
        places = [[cpus[rank % len(cpus)]] for rank in range(wanted.world)]
        with herd(Path(folder) / "c", wanted.world, backend="empty", combine="partial", cpus=places, dtype=wanted.dtype) as h:
            x = torch.zeros(1, config.hidden_size, dtype=getattr(torch, wanted.dtype))
            ids = torch.arange(config.num_experts_per_tok, dtype=torch.int32)[None]
            weights = torch.full(ids.shape, 0.25)
            laps = []
            for _ in range(CALLS + WARM_UP):
                before = time.perf_counter()
                h.experts(0, x, ids, weights)()
                laps.append(time.perf_counter() - before)
    return float(np.median(laps[WARM_UP:]))


def cold_rows(checkpoint: str, wanted_bytes: int) -> tuple[float | None, str]:
    """(bytes per second, where from) of pages that are not in memory, touched in order through a mapping, as a worker's kernel does."""
    if checkpoint:
        return _cold_checkpoint(Checkpoint.open(checkpoint), wanted_bytes)
    with tempfile.NamedTemporaryFile(prefix="evrun-doctor-", dir=os.getcwd() if os.access(os.getcwd(), os.W_OK) else None) as file:
        file.write(os.urandom(1 << 20) * (wanted_bytes >> 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapping = np.frombuffer(mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
        if resident_pages(mapping).mean() > 0.5:
            return None, f"{file.name}: its file system keeps everything in memory"
        return _touch([mapping]), f"a file in {os.path.dirname(file.name)}"


def _cold_checkpoint(checkpoint: Checkpoint, wanted_bytes: int) -> tuple[float | None, str]:
    config = checkpoint.config
    cold: list[npt.NDArray[np.uint8]] = []
    for layer in range(config.num_hidden_layers):
        pages: dict[Path, npt.NDArray[np.bool_]] = {}
        for expert in range(config.n_routed_experts):
            for tensor in checkpoint.expert(layer, expert)[::2]:
                if tensor.shard not in pages:
                    pages[tensor.shard] = resident_pages(checkpoint.mapping(tensor.shard))
                first, last = tensor.offset // mmap.PAGESIZE, (tensor.offset + tensor.data.nbytes) // mmap.PAGESIZE
                if not pages[tensor.shard][first:last].any():
                    cold.append(tensor.data.reshape(-1))
            if sum(part.nbytes for part in cold) >= wanted_bytes:
                return _touch(cold), f"{len(cold)} tensors of layer {layer}"
    return (_touch(cold), f"{len(cold)} tensors") if cold else (None, "everything is in memory")


def _touch(parts: Sequence[npt.NDArray[np.uint8]]) -> float:
    before = time.perf_counter()
    for part in parts:
        part[:: mmap.PAGESIZE].sum()
    return sum(part.nbytes for part in parts) / (time.perf_counter() - before)


if __name__ == "__main__":
    from evrun.expert_worker.wire.errors import EvrunError

    try:
        sys.stdout.write(json.dumps(measure(Wanted.load(sys.argv[1])).to_json()))
    except EvrunError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
