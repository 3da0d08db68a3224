"""How calls reach the workers and replies come back: the two ends that every transport has.

Transports are siblings: `zmq_link` (every message over the hub's ZeroMQ ipc socket) and `doorbell_link` (calls and
replies in shared cells, an eventfd rung for each; hello, ready and stop still over ZeroMQ). Who calls never asks which.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from typing import Any, Protocol

from evrun.expert_worker.wire.hub import Hub, identity_of
from evrun.expert_worker.wire.messages import Call, Failed, Partial
from evrun.expert_worker.wire.slots import CallMemory, Cell, ReplyMemory

TRANSPORTS = ("doorbell", "zmq")


class PlainAnswer(Protocol):
    """The fields of messages.Partial that the transport did not check already."""

    @property
    def rows(self) -> int: ...

    @property
    def checksum(self) -> int: ...

    @property
    def counters(self) -> Sequence[int]: ...

    @property
    def compute_s(self) -> float: ...


class Round(Protocol):
    """One token's layer call that nothing disturbs, from its activation to its sum. Addresses are of contiguous memory."""

    @property
    def answers(self) -> Sequence[PlainAnswer]:
        """The newest plain answer of each rank; always the same objects."""
        ...

    def send(self, batch: list[int], x: int, ids: int, weights: int) -> None:
        """Put the token into a slot and hand their calls to free ranks.

        batch  how many ranks, the sequence of the first one's call (the others' follow), layer, slot; then for each rank,
               ascending: rank, incarnation, number of experts, expert ids ascending
        x      [H] activation dtype; ids [K] int32; weights [K] fp32
        """
        ...

    def wait(self, others_fd: int, timeout_ms: int) -> bool:
        """Until all have answered plainly. False, and nothing is taken, when something else came first (see gather)."""
        ...

    def sum(self, out: int) -> bool:
        """After `wait`: out [H] fp32 = the sum in the order of coordinator.combine; the answers are taken.

        False, and nothing is taken, when an answer has other rows than were asked for or the sum is not finite.
        """
        ...


class ExpertGroup(Protocol):
    """The coordinator's end: calls to all ranks."""

    @property
    def round(self) -> Round | None:
        """The short way of one token; None where this transport has none."""
        ...

    def fds(self) -> list[int]:
        """Descriptors that turn readable when `receive` may have something, beside the hub's own."""
        ...

    def submit(self, calls: Sequence[tuple[int, Call]]) -> None:
        """Hand calls to their ranks, without waiting. A rank that cannot be reached is one whose death will be noted."""
        ...

    def gather(self, ranks: array[int], others_fd: int, timeout_s: float) -> Sequence[PlainAnswer] | None:
        """Wait until all these ranks (int32) gave plain answers to the newest calls: the answers, in this order.

        Empty when something else came first: an answer that is not plain, `others_fd` readable, the time over; nothing is
        taken then, `receive` has it. None: this transport cannot; use `receive`.
        """
        ...

    def receive(self, ready: Container[int]) -> list[tuple[int, Partial | Failed | None]]:
        """(rank, message) of the replies that came, without waiting; None is a damaged one.

        ready  descriptors that turned readable. Messages of the hub are not among the replies.
        """
        ...


class Short(Protocol):
    """A lane's native function for calls of one token, as addresses (kernels.api.OneToken)."""

    @property
    def function(self) -> int: ...

    @property
    def lane(self) -> int: ...


class ExpertPort(Protocol):
    """A worker's end."""

    def shorten(self, short: Short, counts: int, calls: CallMemory, reply: ReplyMemory, num_experts: int) -> None:
        """From now on let `receive` answer calls of one token by itself, where this transport can, and give the others.

        counts  address of the int64 words that an answer carries (messages.COUNTERS)
        """
        ...

    def receive(self, timeout_s: float) -> Any:
        """The next message, or None after `timeout_s`. Raises EOFError when the launcher is gone, CodecError for junk."""
        ...

    def answer(self, partial: Partial) -> None:
        """Answer the newest call."""
        ...

    def encode(self, message: Partial | Failed) -> bytes:
        """A reply as this transport carries it."""
        ...

    def reply(self, data: bytes) -> None:
        """Answer with what `encode` gave, or with a part of it."""
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
    transport: str, address: str, rank: int, incarnation: int, lifeline_fd: int, run_id: str, requests: Cell, replies: Cell,
    bells: tuple[int, int], processes: int,
) -> ExpertPort:  # fmt: skip
    """bells      (request eventfd, reply eventfd) of this rank; cells and bells are unused by zmq
    processes  of the run: a wait spins only where there are more cores
    """
    if transport == "zmq":
        from evrun.expert_worker.wire.zmq_link import ZmqPort

        return ZmqPort(address, identity_of(rank, incarnation), lifeline_fd)
    from evrun.expert_worker.wire.doorbell_link import DoorbellPort

    return DoorbellPort(
        address, identity_of(rank, incarnation), lifeline_fd, run_id, incarnation, requests, replies, bells, processes
    )
