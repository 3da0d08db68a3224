"""Transport `doorbell`: a message lies in a shared cell, an eventfd is rung for it; nothing passes through a socket.

One call is in flight per rank, so one cell each way is enough. The ring is a system call, which orders the cell's bytes
before it. A ring that an older incarnation left behind finds a message whose incarnation does not fit: dropped.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Container

from evrun.expert_worker.wire.slots import CallMemory, Cell, ReplyMemory
from evrun.expert_worker.wire.zmq_link import ZmqPort


def _hush(bell: int) -> bool:
    """Take the rings of a bell, without waiting. Whether there were any."""
    try:
        os.eventfd_read(bell)
    except BlockingIOError:
        return False
    return True


class DoorbellGroup:
    """link.ExpertGroup over cells and eventfds (non-blocking descriptors)."""

    def __init__(self, calls: CallMemory, replies: list[ReplyMemory], bells: list[tuple[int, int]]) -> None:
        self._requests = [calls.cell(rank) for rank in range(len(replies))]
        self._replies = [reply.cell for reply in replies]
        self._bells = bells
        for pair in bells:
            for bell in pair:
                os.set_blocking(bell, False)

    def fds(self) -> list[int]:
        return [reply_bell for _, reply_bell in self._bells]

    def submit(self, rank: int, incarnation: int, data: bytes) -> bool:
        self._requests[rank].write(data)
        with contextlib.suppress(BlockingIOError):  # a full counter still rings
            os.eventfd_write(self._bells[rank][0], 1)
        return True

    def receive(self, ready: Container[int]) -> list[tuple[int, bytes]]:
        return [(rank, self._replies[rank].read()) for rank, (_, bell) in enumerate(self._bells) if bell in ready and _hush(bell)]


class DoorbellPort(ZmqPort):
    """link.ExpertPort: hello, ready and stop over the socket, calls and replies through cells."""

    def __init__(self, address: str, identity: bytes, lifeline_fd: int, requests: Cell, replies: Cell, bells: tuple[int, int]) -> None:
        super().__init__(address, identity, lifeline_fd)
        self._requests, self._replies = requests, replies
        self._request_bell, self._reply_bell = bells
        os.set_blocking(self._request_bell, False)
        self._poll.register(self._request_bell, select.POLLIN)

    def receive(self, timeout_s: float) -> bytes | None:
        data = self._control()
        if data is None and self._request_bell in self._wait(timeout_s) and _hush(self._request_bell):
            return self._requests.read()
        return data if data is not None else self._control()

    def reply(self, data: bytes) -> None:
        self._replies.write(data)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._reply_bell, 1)
