"""Transport `doorbell`: a message lies in a shared cell, an eventfd is rung for it; nothing passes through a socket.

One call is in flight per rank, so one cell each way is enough. A message that an older incarnation left behind carries
that incarnation: dropped. Waits sleep; before they do they look at the cell for SPIN_S, but only where the machine has a
core for every process of the run and one more, and only on processors whose stores are seen in order (x86).
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import time
from collections.abc import Container, Sequence
from typing import Any

from evrun.expert_worker.wire import cell_codec
from evrun.expert_worker.wire.codec import CodecError
from evrun.expert_worker.wire.messages import Call, Failed, Partial
from evrun.expert_worker.wire.slots import CallMemory, Cell, ReplyMemory
from evrun.expert_worker.wire.zmq_link import ZmqPort

SPIN_S = 150e-6
"""A little more than the wake-up it saves; a token's layers follow each other faster than that only with empty kernels."""


def spin_s(processes: int) -> float:
    """How long a wait of a run of this many processes may spin here."""
    cores = os.cpu_count() or 1
    return SPIN_S if cores > processes and platform.machine() in ("x86_64", "AMD64") else 0.0


def _hush(bell: int) -> None:
    """Take the rings of a bell, without waiting."""
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(bell)


def _ring(bell: int) -> None:
    with contextlib.suppress(BlockingIOError):  # a full counter still rings
        os.eventfd_write(bell, 1)


class DoorbellGroup:
    """link.ExpertGroup over cells and eventfds (non-blocking descriptors)."""

    def __init__(self, run_id: str, calls: CallMemory, replies: list[ReplyMemory], bells: list[tuple[int, int]]) -> None:
        self._run_id = run_id
        self._requests = [calls.cell(rank) for rank in range(len(replies))]
        self._replies = [reply.cell for reply in replies]
        self._seen = [cell.turn() for cell in self._replies]
        self._bells = bells
        self._spin_s = spin_s(len(replies) + 1)
        for pair in bells:
            for bell in pair:
                os.set_blocking(bell, False)

    def fds(self) -> list[int]:
        return [reply_bell for _, reply_bell in self._bells]

    def submit(self, rank: int, call: Call) -> bool:
        self._requests[rank].write(cell_codec.encode(call))
        _ring(self._bells[rank][0])
        return True

    def spin(self, ranks: Sequence[int]) -> bool:
        if not self._spin_s:
            return False
        until = time.perf_counter() + self._spin_s
        missing = list(ranks)
        while missing and time.perf_counter() < until:
            missing = [rank for rank in missing if self._replies[rank].turn() == self._seen[rank]]
        return not missing

    def receive(self, ready: Container[int]) -> list[tuple[int, Partial | Failed | None]]:
        """The turn of a cell tells that there is a message; a ring only ends a sleep, and may come for one already taken."""
        found: list[tuple[int, Partial | Failed | None]] = []
        for rank, (cell, (_, bell)) in enumerate(zip(self._replies, self._bells, strict=True)):
            if bell in ready:
                _hush(bell)
            turn = cell.turn()
            if turn != self._seen[rank]:
                self._seen[rank] = turn
                found.append((rank, self._decode(cell)))
        return found

    def _decode(self, cell: Cell) -> Partial | Failed | None:
        try:
            message = cell_codec.decode(cell.read(), self._run_id)
        except CodecError:
            return None
        return message if isinstance(message, Partial | Failed) else None


class DoorbellPort(ZmqPort):
    """link.ExpertPort: hello, ready and stop over the socket, calls and replies through cells."""

    def __init__(
        self, address: str, identity: bytes, lifeline_fd: int, run_id: str, requests: Cell, replies: Cell, bells: tuple[int, int],
        processes: int,
    ) -> None:  # fmt: skip
        super().__init__(address, identity, lifeline_fd)
        self._run_id, self._requests, self._replies = run_id, requests, replies
        self._request_bell, self._reply_bell = bells
        self._seen = requests.turn()
        self._spin_s = spin_s(processes)
        os.set_blocking(self._request_bell, False)
        self._poll.register(self._request_bell, select.POLLIN)

    def receive(self, timeout_s: float) -> Any:
        if self._rung() or self._spin():
            return self._call()
        if self._may_have:
            message = super().receive(0.0)
            if message is not None:
                return message
        if self._request_bell in self._wait(timeout_s):
            _hush(self._request_bell)
        return self._call() if self._rung() else super().receive(0.0) if self._may_have else None

    def _rung(self) -> bool:
        return self._requests.turn() != self._seen

    def _spin(self) -> bool:
        if not self._spin_s:
            return False
        until = time.perf_counter() + self._spin_s
        while time.perf_counter() < until:
            if self._rung():
                return True
        return False

    def _call(self) -> Any:
        self._seen = self._requests.turn()
        return cell_codec.decode(self._requests.read(), self._run_id)

    def encode(self, message: Partial | Failed) -> bytes:
        return cell_codec.encode(message)

    def reply(self, data: bytes) -> None:
        self._replies.write(data)
        _ring(self._reply_bell)
