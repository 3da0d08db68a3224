"""Transport `zmq`: every message over the hub's ipc socket."""

from __future__ import annotations

import select
from array import array
from collections.abc import Container, Sequence
from typing import Any

import zmq

from evrun.expert_worker.wire.codec import MAX_BYTES
from evrun.expert_worker.wire.hub import HIGH_WATER, Hub
from evrun.expert_worker.wire.link import PlainAnswer, Round, Short
from evrun.expert_worker.wire.messages import Call, Failed, Partial, codec
from evrun.expert_worker.wire.slots import CallMemory, ReplyMemory

SEND_TIMEOUT_MS = 5000


class ZmqGroup:
    """link.ExpertGroup: submits through the hub; replies are the hub's own messages, so `receive` has none."""

    round: Round | None = None

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def fds(self) -> list[int]:
        return []

    def submit(self, calls: Sequence[tuple[int, Call]]) -> None:
        for rank, call in calls:
            self._hub.send(rank, call.incarnation, codec.encode(call))

    def gather(self, ranks: array[int], others_fd: int, timeout_s: float) -> Sequence[PlainAnswer] | None:
        return None

    def receive(self, ready: Container[int]) -> list[tuple[int, Partial | Failed | None]]:
        return []


class ZmqPort:
    """link.ExpertPort: a DEALER with the incarnation's routing id, and the launcher's lifeline."""

    def __init__(self, address: str, identity: bytes, lifeline_fd: int) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDTIMEO, SEND_TIMEOUT_MS), (zmq.SNDHWM, HIGH_WATER), (zmq.RCVHWM, HIGH_WATER)):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.connect(address)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._may_have = True
        """Whether the socket may hold a message: its descriptor is edge-triggered, and a send can take the edge."""
        self._lifeline_fd = lifeline_fd
        self._poll = select.poll()
        self._poll.register(lifeline_fd, select.POLLIN)
        self._poll.register(self._fd, select.POLLIN)

    def shorten(self, short: Short, counts: int, calls: CallMemory, reply: ReplyMemory, num_experts: int) -> None:
        """A message here has to be unpacked first: every call is Python's."""

    def receive(self, timeout_s: float) -> Any:
        data = self._control()
        if data is None:
            self._wait(timeout_s)
            data = self._control()
        return None if data is None else codec.decode(data)

    def _control(self) -> bytes | None:
        """The next message of the socket, without waiting."""
        if not self._may_have:
            return None
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            self._may_have = False
            return None
        return frames[0] if len(frames) == 1 else b""

    def _wait(self, timeout_s: float) -> list[int]:
        """Descriptors that turned readable. Raises EOFError when the launcher is gone."""
        ready = [fd for fd, _ in self._poll.poll(max(0.0, timeout_s) * 1000)]
        if self._lifeline_fd in ready:
            raise EOFError("the launcher is gone")
        self._may_have |= self._fd in ready
        return ready

    def answer(self, partial: Partial) -> None:
        self.reply(self.encode(partial))

    def encode(self, message: Partial | Failed) -> bytes:
        return codec.encode(message)

    def reply(self, data: bytes) -> None:
        self._socket.send(data)
        self._may_have = True

    def announce(self, message: Any) -> None:
        self._socket.send(codec.encode(message))
        self._may_have = True

    def close(self) -> None:
        self._socket.close(1000)
        self._context.term()
