"""The coordinator's ZeroMQ socket for its workers: hello, ready, stop, and with transport zmq the calls themselves.

A peer counts once its Hello carries the run's secret; everything before, malformed, too long or of another run is
dropped and counted. Sends never block: a peer that does not read has at most one call in flight, so the queue of
HIGH_WATER messages never fills.
"""

from __future__ import annotations

import hmac
from typing import Any

import zmq

from evrun.expert_worker.wire.codec import MAX_BYTES, CodecError
from evrun.expert_worker.wire.messages import Hello, codec

HIGH_WATER = 64


def identity_of(rank: int, incarnation: int) -> bytes:
    """The ZeroMQ routing id of an incarnation."""
    return f"rank-{rank}.{incarnation}".encode()


class Hub:
    """ROUTER bound at the run's own ipc address. Belongs to one thread."""

    def __init__(self, address: str, run_id: str, secret: str) -> None:
        self._run_id, self._secret = run_id, secret
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in ((zmq.LINGER, 0), (zmq.ROUTER_MANDATORY, 1), (zmq.SNDHWM, HIGH_WATER), (zmq.RCVHWM, HIGH_WATER)):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        self._socket.bind(address)
        self.may_have = True
        """Whether the socket may hold a message: its descriptor is edge-triggered, and a send can take the edge."""
        self._peers: dict[bytes, tuple[int, int]] = {}
        self.junk = 0
        """Messages dropped because their sender or their bytes were not ours."""

    @property
    def fd(self) -> int:
        """Turns readable when a message may have come: set `may_have` then."""
        return int(self._socket.getsockopt(zmq.FD))

    def receive(self) -> list[tuple[int, int, Any]]:
        """(rank, incarnation, message) of everything that came, without waiting; None for a known peer's damaged message."""
        received: list[tuple[int, int, Any]] = []
        while self.may_have:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self.may_have = False
                break
            message = self._accept(frames)
            if message is None:
                self.junk += 1
            else:
                received.append(message)
        return received

    def _accept(self, frames: list[bytes]) -> tuple[int, int, Any] | None:
        if len(frames) != 2:
            return None
        identity, data = frames
        try:
            message = codec.decode(data)
        except CodecError:
            known = self._peers.get(identity)
            return (*known, None) if known else None
        if isinstance(message, Hello):
            genuine = hmac.compare_digest(message.secret.encode(), self._secret.encode()) and message.run_id == self._run_id
            if not genuine or identity != identity_of(message.rank, message.incarnation):
                return None
            self._peers[identity] = message.rank, message.incarnation
        peer = self._peers.get(identity)
        return (*peer, message) if peer else None

    def send(self, rank: int, incarnation: int, data: bytes) -> bool:
        """False when this incarnation is not connected or does not read."""
        identity = identity_of(rank, incarnation)
        if identity not in self._peers:
            return False
        self.may_have = True
        try:
            self._socket.send_multipart([identity, data], zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError):
            return False
        return True

    def forget(self, rank: int, incarnation: int) -> None:
        """Nothing this incarnation sent counts from now on."""
        self._peers.pop(identity_of(rank, incarnation), None)

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()
