"""How calls reach the workers and replies come back: the two ends that every transport has.

Transports are siblings: `zmq_link` (every message over the hub's ZeroMQ ipc socket) and `doorbell_link` (calls and
replies in shared cells, an eventfd rung for each; hello, ready and stop still over ZeroMQ). Who calls never asks which.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol

from evrun.expert_worker.wire.hub import Hub
from evrun.expert_worker.wire.slots import CallMemory, Cell, ReplyMemory

TRANSPORTS = ("doorbell", "zmq")


class ExpertGroup(Protocol):
    """The coordinator's end: calls to all ranks."""

    def fds(self) -> list[int]:
        """Descriptors that turn readable when `receive` may have something, beside the hub's own."""
        ...

    def submit(self, rank: int, incarnation: int, data: bytes) -> bool:
        """Hand a call to a rank, without waiting. False when this incarnation cannot be reached."""
        ...

    def receive(self, ready: Container[int]) -> list[tuple[int, bytes]]:
        """(rank, message) of the replies that came, without waiting; `ready`: descriptors that turned readable.

        Messages of the hub are not among them.
        """
        ...


class ExpertPort(Protocol):
    """A worker's end."""

    def receive(self, timeout_s: float) -> bytes | None:
        """The next call or stop, or None after `timeout_s`. Raises EOFError when the launcher is gone."""
        ...

    def reply(self, data: bytes) -> None:
        """Answer a call."""
        ...

    def announce(self, data: bytes) -> None:
        """Say hello or ready."""
        ...

    def close(self) -> None: ...


def open_group(transport: str, hub: Hub, calls: CallMemory, replies: list[ReplyMemory], bells: list[tuple[int, int]]) -> ExpertGroup:
    """`bells`: (request eventfd, reply eventfd) per rank; unused by zmq."""
    if transport == "zmq":
        from evrun.expert_worker.wire.zmq_link import ZmqGroup

        return ZmqGroup(hub)
    from evrun.expert_worker.wire.doorbell_link import DoorbellGroup

    return DoorbellGroup(calls, replies, bells)


def open_port(
    transport: str, address: str, identity: bytes, lifeline_fd: int, requests: Cell, replies: Cell, bells: tuple[int, int]
) -> ExpertPort:
    """`bells`: (request eventfd, reply eventfd) of this rank; cells and bells are unused by zmq."""
    if transport == "zmq":
        from evrun.expert_worker.wire.zmq_link import ZmqPort

        return ZmqPort(address, identity, lifeline_fd)
    from evrun.expert_worker.wire.doorbell_link import DoorbellPort

    return DoorbellPort(address, identity, lifeline_fd, requests, replies, bells)
