"""How bytes of a shard get into card memory: the rungs below the card cache, fastest first.

`registered`  the shard's own mapping, registered with the driver: DMA from the page cache, no host copy
`arena`       a copy into pinned pieces, several in flight, then DMA
Both have one method, `copy`; which one serves a shard is decided once per shard, within a budget, and said in the log.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from evrun.expert_worker.card.layout import Copy
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.kernels.cuda.driver import REGISTER_PORTABLE, REGISTER_READ_ONLY, Device, Event, Registration, Stream
from evrun.kernels.cuda.errors import DeviceError

PIECE_BYTES = 2 << 20
PIECES = 32
POPULATE_BYTES = 256 << 20
_MADV_POPULATE_READ = 22
log = logging.getLogger("rungs")


class Registered:
    """Shards registered on first use, the least recently used one let go when the budget is full.

    budget_bytes  most bytes registered at a time
    beat          called while a shard's pages are read in, which may take long when they are not in the page cache
    release       called before a shard is let go: waits for copies that may still be under way
    """

    name = "registered"

    def __init__(
        self, device: Device, checkpoint: Checkpoint, budget_bytes: int, beat: Callable[[], None], release: Callable[[Path], None]
    ) -> None:  # fmt: skip
        self._device, self._checkpoint, self._beat, self._release = device, checkpoint, beat, release
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._shards: OrderedDict[Path, tuple[Registration, object, int]] = OrderedDict()
        self._refused: dict[Path, str] = {}
        self.how = ""
        """Which kind of registration this driver took, for the log."""

    def probe(self, shard: Path) -> str | None:
        """Whether this driver registers file mappings at all, tried on one page: None, or why not."""
        reasons = []
        for how, _, address, flags in self._ways(shard, self._checkpoint.mapping(shard)):
            try:
                self._device.register(address, mmap.PAGESIZE, flags).close()
            except DeviceError as error:
                if error.lost:
                    raise
                reasons.append(f"{how}: {error}")
                continue
            self.how = how
            return None
        return "; ".join(reasons)

    def address(self, shard: Path, in_use: Sequence[Path]) -> int | None:
        """Host address of the shard's first byte in a registered mapping, or None: the next rung serves it.

        in_use  shards that stay: the caller is about to copy from them
        """
        found = self._shards.get(shard)
        if found:
            self._shards.move_to_end(shard)
            return found[0].address
        if shard in self._refused:
            return None
        size = os.stat(shard).st_size
        if not self._make_room(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE, in_use):
            self._refuse(shard, f"{size} bytes do not fit the pin budget of {self.budget_bytes} bytes beside the shards in use")
            return None
        return self._register(shard, size)

    def touch(self, shard: Path) -> None:
        """Native code copied from the shard."""
        if shard in self._shards:
            self._shards.move_to_end(shard)

    def close(self) -> None:
        for registration, _, _ in self._shards.values():
            registration.close()
        self._shards.clear()

    def _make_room(self, size: int, in_use: Sequence[Path]) -> bool:
        for shard in list(self._shards):
            if self.used_bytes + size <= self.budget_bytes:
                break
            if shard not in in_use:
                self._release(shard)
                registration, _, held = self._shards.pop(shard)
                registration.close()
                self.used_bytes -= held
                log.info("%s let go: %d bytes are no longer registered", shard.name, held)
        return self.used_bytes + size <= self.budget_bytes

    def _register(self, shard: Path, size: int) -> int | None:
        view = self._checkpoint.mapping(shard)
        self._populate(view.base, size)
        held = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        reasons = []
        for how, keep, address, flags in self._ways(shard, view):
            try:
                registration = self._device.register(address, held, flags)
            except DeviceError as error:
                if error.lost:
                    raise
                reasons.append(f"{how}: {error}")
                continue
            self._shards[shard] = registration, keep, held
            self.used_bytes += held
            if how != self.how:
                log.info("registering shards works: %s", how)
                self.how = how
            return address
        self._refuse(shard, "; ".join(reasons))
        return None

    def _ways(self, shard: Path, view: np.ndarray) -> list[tuple[str, object, int, int]]:
        """(description, what must stay alive, address, flags): the read-only mapping, then a private writable one."""
        with shard.open("rb") as file:
            private = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        own = np.frombuffer(private, np.uint8)
        return [
            ("read-only shared mapping", view, view.ctypes.data, REGISTER_PORTABLE | REGISTER_READ_ONLY),
            ("private writable mapping", own, own.ctypes.data, REGISTER_PORTABLE),
        ]

    def _populate(self, mapping: object, size: int) -> None:
        """Read the pages in, in pieces that show progress: registering a cold shard would be one long silence."""
        if not isinstance(mapping, mmap.mmap):
            return
        for start in range(0, size, POPULATE_BYTES):
            with contextlib.suppress(OSError, ValueError):  # kernels before 5.14: registering reads the pages then
                mapping.madvise(_MADV_POPULATE_READ, start, min(POPULATE_BYTES, size - start))
            self._beat()

    def _refuse(self, shard: Path, reason: str) -> None:
        self._refused[shard] = reason
        log.warning("%s takes the arena: %s; its rows cost a host copy each", shard.name, reason)


class Arena:
    """Pinned pieces that copies of page-cache bytes pass through. `threads` copy side by side."""

    name = "arena"

    def __init__(self, device: Device, checkpoint: Checkpoint, threads: int, beat: Callable[[], None]) -> None:
        self._device, self._checkpoint, self._beat = device, checkpoint, beat
        self._pinned = device.pinned(PIECE_BYTES * PIECES)
        self._events: list[Event] = [device.event() for _ in range(PIECES)]
        self._used = [False] * PIECES
        self._next = 0
        self._filling: deque[tuple[int, int, int, Future[None]]] = deque()
        """Pieces on their way into pinned memory, oldest first: (piece, address on the card, bytes, when it is filled)."""
        self._threads = max(1, min(threads, PIECES // 4))
        self._pool = ThreadPoolExecutor(self._threads)

    def copy(self, what: Copy, to: int, stream: Stream) -> None:
        """Bring `what` to address `to` on the card; `flush` ends a sequence of copies.

        Pieces are filled side by side, one thread each, across the copies of a sequence, and leave for the card in order.
        """
        source = self._checkpoint.mapping(what.shard)[what.offset : what.offset + what.size_bytes]
        for start in range(0, what.size_bytes, PIECE_BYTES):
            if len(self._filling) == 2 * self._threads:  # one is being filled and one waits, so that no thread ever does
                self._issue(stream)
            piece, self._next = self._next, (self._next + 1) % PIECES
            if self._used[piece]:
                self._events[piece].synchronize()
            part = source[start : start + PIECE_BYTES]
            room = self._pinned.array[piece * PIECE_BYTES :][: len(part)]
            self._filling.append((piece, to + start, len(part), self._pool.submit(np.copyto, room, part)))

    def flush(self, stream: Stream) -> None:
        """Returns when every piece was issued."""
        while self._filling:
            self._issue(stream)

    def _issue(self, stream: Stream) -> None:
        piece, to, size, filled = self._filling.popleft()
        filled.result()
        self._device.copy_in(to, self._pinned.address + piece * PIECE_BYTES, size, stream)
        self._events[piece].record(stream)
        self._used[piece] = True
        self._beat()

    def close(self) -> None:
        self._pool.shutdown()
        self._pinned.close()
