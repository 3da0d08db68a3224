"""Host to card, in the pieces that rows travel in: pinned memory, and the registered mapping of a file in the page cache."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from evrun.bench.report import Row, timed
from evrun.kernels.cuda.driver import REGISTER_PORTABLE, REGISTER_READ_ONLY, Device, PinnedMemory, Registration, device_uuids

ROW_BYTES = 18_800_640
ROWS = 24
ROUNDS = 12


class Source:
    """Rows on the host and room for them on one card."""

    def __init__(self, uuid: str, kind: str, path: str, count: int) -> None:
        self.device = Device(uuid)
        self.stream = self.device.stream()
        self._count = count
        self._held: PinnedMemory | Registration
        self.to = self.device.allocate(ROW_BYTES * count)
        if kind == "pinned":
            pinned = self.device.pinned(ROW_BYTES * count)
            pinned.array[:] = 1
            self.address, self._held = pinned.address, pinned
        else:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
            self._view = np.frombuffer(self._map, np.uint8)
            self.address = self._view.ctypes.data
            size = -(-self._view.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            self._held = self.device.register(self.address, size, REGISTER_PORTABLE | REGISTER_READ_ONLY)

    def close(self) -> None:
        self.device.use()
        self._held.close()
        self.to.close()

    def copy_all(self) -> float:
        """Seconds for every row once."""
        self.device.use()
        started = time.perf_counter()
        for row in range(self._count):
            self.device.copy_in(self.to.address + row * ROW_BYTES, self.address + row * ROW_BYTES, ROW_BYTES, self.stream)
        self.stream.synchronize()
        return time.perf_counter() - started


def run(cards: list[int], kinds: Sequence[str] = ("pinned", "registered"), count: int = ROWS) -> list[Row]:
    """Rows: each card alone, then all together; `gb_per_s` of the whole. Raises DeviceError, UnavailableError."""
    uuids = device_uuids()
    rows: list[Row] = []
    with tempfile.NamedTemporaryFile(prefix="evrun-link-") as file:
        file.write(os.urandom(1 << 20) * (ROW_BYTES * count // (1 << 20) + 1))
        file.flush()
        for kind in kinds:
            sources = [Source(uuids[card], kind, file.name, count) for card in cards]
            for card, source in zip(cards, sources, strict=True):
                seconds = [source.copy_all() for _ in range(ROUNDS)][2:]
                rows.append(timed(seconds, source=kind, cards=str(card), bytes=ROW_BYTES * count))
            if len(sources) > 1:
                seconds = [_together([s.copy_all for s in sources]) for _ in range(ROUNDS)][2:]
                rows.append(timed(seconds, source=kind, cards=",".join(map(str, cards)), bytes=ROW_BYTES * count * len(sources)))
            for source in sources:
                source.close()
    return rows


def _together(work: list[Callable[[], float]]) -> float:
    """Seconds until all are done, started at once in a thread each."""
    threads = [threading.Thread(target=w) for w in work]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started
