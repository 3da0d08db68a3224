"""How fast one card gets rows and computes them, by the worker's own rungs and kernels."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evrun.expert_worker.card.lane import RESERVE_BYTES
from evrun.expert_worker.card.layout import Copy
from evrun.expert_worker.card.rows import staging_bytes
from evrun.expert_worker.card.rungs import Arena, Registered
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.kernels import cuda, self_test
from evrun.kernels.api import FfnShape
from evrun.kernels.cuda import errors
from evrun.kernels.cuda.backend import CudaBackend
from evrun.launch.doctor.rates import CardRate, Rate, Wanted

ROWS = 12
ROUNDS = 6
PASSES = (16, 64)
KERNEL_CALLS = 20


class _OneFile:
    """A file in the page cache in the place of a checkpoint: all that a rung asks for is its mapping."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._view = np.frombuffer(mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)

    def mapping(self, shard: Path) -> npt.NDArray[np.uint8]:
        return self._view


def measure_all(wanted: Wanted, shape: FfnShape, config: ModelConfig) -> tuple[dict[str, CardRate], dict[str, str]]:
    """(rates, why a card has none) by UUID."""
    rates, failed = {}, {}
    for uuid in wanted.cards:
        try:
            rates[uuid] = measure(uuid, shape, config, wanted)
        except (errors.UnavailableError, errors.CompileError, errors.DeviceError) as error:
            failed[uuid] = str(error).splitlines()[0]
    return rates, failed


def measure(uuid: str, shape: FfnShape, config: ModelConfig, wanted: Wanted) -> CardRate:
    """Raises UnavailableError, CompileError, DeviceError."""
    device = cuda.CompilingDevice(uuid)
    try:
        free, _ = device.memory_bytes()
        kernel = cuda.create_on(device, shape, max(PASSES), config.num_experts_per_tok, Path(wanted.cache_dir), config.n_routed_experts)
        experts = _kernel_rate(device, kernel, config)
        with tempfile.NamedTemporaryFile(prefix="evrun-doctor-") as file:
            size = ROWS * config.row_bytes
            file.write(os.urandom(1 << 20) * (size // (1 << 20) + 1))
            file.flush()
            path = Path(file.name)
            one: Any = _OneFile(path)
            registered = Registered(device, one, 1 << 40, lambda: None, lambda shard: None)
            reason = registered.probe(path)
            fast = _registered_rate(device, registered, path, config.row_bytes) if reason is None else None
            arena = Arena(device, one, wanted.arena_threads, lambda: None)
            slow = _arena_rate(device, arena, path, config.row_bytes)
            registered.close()
            arena.close()
        room = max(0, free - RESERVE_BYTES - staging_bytes(config.row_bytes))
        return CardRate(fast, registered.how or reason or "", slow, experts, room)
    finally:
        device.close()


def _registered_rate(device: cuda.CompilingDevice, registered: Registered, path: Path, row_bytes: int) -> float:
    address = registered.address(path, [])
    stream, to = device.stream(), device.allocate(row_bytes)
    laps = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for row in range(ROWS):
            device.copy_in(to.address, (address or 0) + row * row_bytes, row_bytes, stream)
        stream.synchronize()
        laps.append(time.perf_counter() - started)
    to.close()
    return ROWS * row_bytes / float(np.median(laps[1:]))


def _arena_rate(device: cuda.CompilingDevice, arena: Arena, path: Path, row_bytes: int) -> float:
    stream, to = device.stream(), device.allocate(row_bytes)
    laps = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for row in range(ROWS):
            arena.copy(Copy(path, row * row_bytes, row_bytes, 0), to.address, stream)
        arena.flush(stream)
        stream.synchronize()
        laps.append(time.perf_counter() - started)
    to.close()
    return ROWS * row_bytes / float(np.median(laps[1:]))


def _kernel_rate(device: cuda.CompilingDevice, kernel: CudaBackend, config: ModelConfig) -> Rate:
    """A call of `top_k` rows in card memory, every token drawing them all."""
    shape, top_k, held = kernel.shape, config.num_experts_per_tok, []
    stream = device.stream()

    def put(array: npt.NDArray[Any]) -> int:
        memory = device.allocate(array.nbytes)
        held.append(memory)
        device.copy_in(memory.address, array.ctypes.data, array.nbytes, stream)
        stream.synchronize()
        return int(memory.address)

    row = self_test.random_row(shape)
    rows = np.array([[put(part) for part in row] for _ in range(top_k)], np.uint64)
    table = put(rows)
    numbers = put(np.arange(top_k, dtype=np.int32))
    seconds = {}
    for tokens in (1, *PASSES):
        x = put(np.full((tokens, shape.hidden), 0x3F80 if shape.dtype == "bfloat16" else 1, shape.activation_dtype))
        ids = put(np.tile(np.arange(top_k, dtype=np.int32), (tokens, 1)))
        weights = put(np.full((tokens, top_k), 0.25, np.float32))
        out = put(np.zeros((tokens, shape.hidden), np.float32))
        laps = []
        for _ in range(KERNEL_CALLS):
            started = time.perf_counter()
            if tokens == 1 and kernel.single:
                kernel.call_single(stream, x, rows, [0.25] * top_k, out, "partial")
            else:
                kernel.call(stream, tokens, x, ids, weights, numbers, table, top_k, out, "partial")
            stream.synchronize()
            laps.append((time.perf_counter() - started) / top_k)
        kernel.check()
        seconds[tokens] = float(np.median(laps[1:]))
    for memory in held:
        memory.close()
    stream.close()
    few, many = PASSES
    return Rate.fit(config.row_bytes, seconds[1], (few, seconds[few]), (many, seconds[many]))
