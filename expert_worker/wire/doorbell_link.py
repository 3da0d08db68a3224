"""Transport `doorbell`: a message lies in a shared cell, an eventfd is rung for it; nothing passes through a socket.

One call is in flight per rank, so one cell each way is enough. A message that an older incarnation left behind carries
that incarnation: dropped. What nothing disturbs goes through native code (exchange); anything else, or everything where the
library is missing, is read from the same cells here. Waits sleep; native ones look at the cell for SPIN_S before they do, but
only where the machine has a core for every process of the run and one more.
"""

from __future__ import annotations

import contextlib
import os
import select
from array import array
from collections.abc import Container, Sequence
from typing import Any

from evrun.expert_worker.wire import cell_codec, exchange
from evrun.expert_worker.wire.codec import CodecError
from evrun.expert_worker.wire.link import PlainAnswer, Round, Short
from evrun.expert_worker.wire.messages import Call, Failed, Partial
from evrun.expert_worker.wire.slots import SLOTS, CallMemory, Cell, ReplyMemory
from evrun.expert_worker.wire.zmq_link import ZmqPort

SPIN_S = 150e-6
"""A little more than the wake-up it saves; a token's layers follow each other faster than that only with empty kernels."""


def spin_ns(processes: int) -> int:
    """How long a wait of a run of this many processes may spin here."""
    return int(SPIN_S * 1e9) if (os.cpu_count() or 1) > processes else 0


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
        self._bells = bells
        for pair in bells:
            for bell in pair:
                os.set_blocking(bell, False)
        self._ranks = exchange.ranks_over(self._requests, replies, bells)
        self._spin_ns = spin_ns(len(replies) + 1)
        library = exchange.load()
        self._native = exchange.Ranks(library, self._ranks) if library else None
        self.round: Round | None = exchange.Round(library, self._ranks, calls, self._spin_ns) if library else None

    def fds(self) -> list[int]:
        return [reply_bell for _, reply_bell in self._bells]

    def submit(self, calls: Sequence[tuple[int, Call]]) -> None:
        if self._native:
            self._native.submit(calls)
            return
        for rank, call in calls:
            self._requests[rank].write(cell_codec.encode(call))
            _ring(self._bells[rank][0])

    def gather(self, ranks: array[int], others_fd: int, timeout_s: float) -> Sequence[PlainAnswer] | None:
        if self._native is None:
            return None
        if not self._native.gather(ranks, others_fd, self._spin_ns, int(timeout_s * 1000)):
            return []
        return [self._ranks[rank] for rank in ranks]

    def receive(self, ready: Container[int]) -> list[tuple[int, Partial | Failed | None]]:
        """The turn of a cell tells that there is a message; a ring only ends a sleep, and may come for one already taken."""
        found: list[tuple[int, Partial | Failed | None]] = []
        for number, (rank, cell, (_, bell)) in enumerate(zip(self._ranks, self._replies, self._bells, strict=True)):
            if bell in ready:
                _hush(bell)
            turn = cell.turn()
            if turn != rank.seen:
                rank.seen = turn
                found.append((number, self._decode(cell)))
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
        self, address: str, identity: bytes, lifeline_fd: int, run_id: str, incarnation: int, requests: Cell, replies: Cell,
        bells: tuple[int, int], processes: int,
    ) -> None:  # fmt: skip
        super().__init__(address, identity, lifeline_fd)
        self._run_id, self._incarnation, self._requests, self._replies = run_id, incarnation, requests, replies
        self._request_bell, self._reply_bell = bells
        os.set_blocking(self._request_bell, False)
        self._poll.register(self._request_bell, select.POLLIN)
        self._port = exchange.Port(requests.address, replies.address, *bells, self._fd, lifeline_fd, requests.turn(), incarnation)
        self._port.capacity = requests.capacity
        library = exchange.load()
        self._native = exchange.WorkerEnd(library, self._port) if library else None
        self._spin_ns = spin_ns(processes)

    def receive(self, timeout_s: float) -> Any:
        if self._may_have and not self._rung():
            message = super().receive(0.0)
            if message is not None:
                return message
        if self._native:
            woken = self._native.receive(self._spin_ns, int(timeout_s * 1000))
            if woken == exchange.TAKEN:
                p = self._port
                return Call(self._run_id, self._incarnation, p.sequence, p.layer, p.slot, p.tokens, p.experts[: p.count], bool(p.checksum))
            timeout_s = 0.0  # waited already: see what it is
        if not self._rung() and self._request_bell in self._wait(timeout_s):
            _hush(self._request_bell)
        return self._call() if self._rung() else super().receive(0.0) if self._may_have else None

    def shorten(self, short: Short, counts: int, calls: CallMemory, reply: ReplyMemory, num_experts: int) -> None:
        if self._native is None:
            return
        layout = calls.layout
        slots = calls.address + layout.slot_offset(0), layout.slot_bytes, layout.ids_at, layout.weights_at, SLOTS
        turn = exchange.Turn(short.function, short.lane, reply.address, *slots, num_experts, reply.result_address, counts)
        self._native.shorten(turn)
        self._held = short, calls, reply

    def _rung(self) -> bool:
        return self._requests.turn() != int(self._port.seen)

    def _call(self) -> Any:
        self._port.seen = self._requests.turn()
        return cell_codec.decode(self._requests.read(), self._run_id)

    def answer(self, partial: Partial) -> None:
        if self._native:
            self._native.reply(partial.rows, partial.checksum, partial.compute_s, [*partial.counters])
        else:
            super().answer(partial)

    def encode(self, message: Partial | Failed) -> bytes:
        return cell_codec.encode(message)

    def reply(self, data: bytes) -> None:
        self._replies.write(data)
        _ring(self._reply_bell)
