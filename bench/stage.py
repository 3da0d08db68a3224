"""What bringing rows through the host costs: page cache to pinned by threads, pinned to pinned, fresh pins, cold file."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np

from evrun.bench.report import Row, timed
from evrun.kernels.cuda.driver import Device, device_uuids

ROW_BYTES = 18_800_640
ROWS = 24
ROUNDS = 6


def run(card: int) -> list[Row]:
    """Rows by `what` and `threads`; floor: the same bytes from pinned memory to the card. Raises DeviceError, UnavailableError."""
    device = Device(device_uuids()[card])
    size = ROW_BYTES * ROWS
    pinned, other = device.pinned(size), device.pinned(size)
    other.array[:] = 3
    rows: list[Row] = []
    with tempfile.NamedTemporaryFile(prefix="evrun-stage-") as file:
        file.write(os.urandom(1 << 20) * (size // (1 << 20) + 1))
        file.flush()
        mapping = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ)
        source = np.frombuffer(mapping, np.uint8)
        floor = _link(device, pinned.address, size)
        for threads in (1, 2, 4, 8):
            for what, array in (("page cache -> pinned", source), ("pinned -> pinned", other.array)):
                seconds = [_copy(array, pinned.array, threads) for _ in range(ROUNDS)][1:]
                rows.append(timed(seconds, floor, what=what, threads=threads, bytes=size))
        os.fsync(file.fileno())
        seconds = []
        for row in range(3):  # mapped pages stay: a fresh mapping would have to fault them all in again
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            part = slice(row * ROW_BYTES, (row + 1) * ROW_BYTES)
            seconds.append(_copy(source[part], pinned.array[part], 1))
        rows.append(timed(seconds, floor / ROWS, what="one row, pages dropped -> pinned", threads=1, bytes=ROW_BYTES))
        seconds = [_copy(source[:ROW_BYTES], pinned.array[:ROW_BYTES], 1) for _ in range(ROUNDS)][1:]
        rows.append(timed(seconds, floor / ROWS, what="one row, warm -> pinned", threads=1, bytes=ROW_BYTES))
    rows.append(timed([_fresh(device) for _ in range(3)], floor / ROWS, what="fresh pin of one row", threads=1, bytes=ROW_BYTES))
    return rows


def copy_rate(card: int, threads: int) -> float:
    """Bytes a second from the page cache into pinned memory. Raises DeviceError, UnavailableError."""
    device, size = Device(device_uuids()[card]), ROW_BYTES * ROWS
    pinned = device.pinned(size)
    with tempfile.NamedTemporaryFile(prefix="evrun-stage-") as file:
        file.write(os.urandom(1 << 20) * (size // (1 << 20) + 1))
        file.flush()
        source = np.frombuffer(mmap.mmap(file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
        seconds = median([_copy(source, pinned.array, threads) for _ in range(ROUNDS)][1:])
    pinned.close()
    device.close()
    return size / seconds


def _copy(source: np.ndarray, to: np.ndarray, threads: int) -> float:
    step = -(-len(source) // threads)
    parts = [slice(i, i + step) for i in range(0, len(source), step)]
    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        list(pool.map(lambda part: np.copyto(to[part], source[part]), parts))
        return time.perf_counter() - started


def _link(device: Device, host: int, size: int) -> float:
    stream, to = device.stream(), device.allocate(size)
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        device.copy_in(to.address, host, size, stream)
        stream.synchronize()
        seconds.append(time.perf_counter() - started)
    to.close()
    return median(seconds[1:])


def _fresh(device: Device) -> float:
    started = time.perf_counter()
    device.pinned(ROW_BYTES).close()
    return time.perf_counter() - started
