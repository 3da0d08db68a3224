"""How calls reach the workers and replies come back: the two ends that every transport has.

Transports are siblings: `zmq_link` (every message over the hub's ZeroMQ ipc socket) and `doorbell_link` (calls and
replies in shared cells, an eventfd rung for each; hello, ready and stop still over ZeroMQ). Who calls never asks which.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, Protocol

from evrun.expert_worker.wire.hub import Hub
from evrun.expert_worker.wire.messages import Call, Failed, Partial
from evrun.expert_worker.wire.slots import CallMemory, Cell, ReplyMemory

TRANSPORTS = ("doorbell", "zmq")


class ExpertGroup(Protocol):
    """The coordinator's end: calls to all ranks."""

    def fds(self) -> list[int]:
        """Descriptors that turn readable when `receive` may have something, beside the hub's own."""
        ...

    def submit(self, rank: int, call: Call) -> bool:
        """Hand a call to a rank, without waiting. False when its incarnation cannot be reached."""
        ...

    def spin(self, ranks: Sequence[int]) -> bool:
        """Look for the replies of these ranks for a short while, if this machine has cores to spare. True: all are there."""
        ...

    def receive(self, ready: Container[int]) -> list[tuple[int, Partial | Failed | None]]:
        """(rank, message) of the replies that came, without waiting; None is a damaged one.

        ready  descriptors that turned readable. Messages of the hub are not among the replies.
        """
        ...


class ExpertPort(Protocol):
    """A worker's end."""

    def receive(self, timeout_s: float) -> Any:
        """The next message, or None after `timeout_s`. Raises EOFError when the launcher is gone, CodecError for junk."""
        ...

    def encode(self, message: Partial | Failed) -> bytes:
        """A reply as this transport carries it."""
        ...

    def reply(self, data: bytes) -> None:
        """Answer a call with what `encode` gave."""
        ...

    def announce(self, message: Any) -> None:
        """Say hello or ready."""
        ...

    def close(self) -> None: ...


def open_group(
    transport: str, hub: Hub, run_id: str, calls: CallMemory, replies: list[ReplyMemory], bells: list[tuple[int, int]]
) -> ExpertGroup:
    """`bells`: (request eventfd, reply eventfd) per rank; unused by zmq."""
    if transport == "zmq":
        from evrun.expert_worker.wire.zmq_link import ZmqGroup

        return ZmqGroup(hub)
    from evrun.expert_worker.wire.doorbell_link import DoorbellGroup

    return DoorbellGroup(run_id, calls, replies, bells)


def open_port(
    transport: str, address: str, identity: bytes, lifeline_fd: int, run_id: str, requests: Cell, replies: Cell, bells: tuple[int, int],
    processes: int,
) -> ExpertPort:  # fmt: skip
    """bells      (request eventfd, reply eventfd) of this rank; cells and bells are unused by zmq
    processes  of the run: a wait spins only where there are more cores
    """
    if transport == "zmq":
        from evrun.expert_worker.wire.zmq_link import ZmqPort

        return ZmqPort(address, identity, lifeline_fd)
    from evrun.expert_worker.wire.doorbell_link import DoorbellPort

    return DoorbellPort(address, identity, lifeline_fd, run_id, requests, replies, bells, processes)
