"""What the launcher and the coordinator say to each other over their socket pair (AF_UNIX, SOCK_SEQPACKET).

One packet is one message of this codec; WorkerStarted carries the worker's pidfd with SCM_RIGHTS. End-of-file on
either side means that the other process is gone. Status is sent when something changed and at least every 0.5 s; a
sender never blocks: a packet that does not fit is dropped and the next one tells all.
"""

from __future__ import annotations

import array
import socket
from dataclasses import dataclass
from typing import Any

from evrun.expert_worker.wire.codec import Codec

codec = Codec("supervision")
MAX_PACKET = 160 << 10
MAX_FDS = 4


@codec.register
@dataclass(frozen=True)
class WorkerStarted:
    """Launcher -> coordinator: this incarnation was started; its pidfd comes with the packet."""

    rank: int
    incarnation: int
    pid: int


@codec.register
@dataclass(frozen=True)
class WorkerGone:
    """Launcher -> coordinator: the process was reaped. `returns` is false when no restart will follow by itself."""

    rank: int
    incarnation: int
    reason: str
    returns: bool


@codec.register
@dataclass(frozen=True)
class Shutdown:
    """Launcher -> coordinator: finish or cancel what runs, then exit 0."""

    reason: str


@codec.register
@dataclass(frozen=True)
class KillWorker:
    """Coordinator -> launcher: this incarnation must go (stalled past its deadline, or damaged)."""

    rank: int
    incarnation: int
    reason: str


@codec.register
@dataclass(frozen=True)
class RankStatus:
    """What the coordinator knows of a rank and the launcher does not."""

    rank: int
    incarnation: int
    state: str
    """starting, ready, serving, stalled, or down."""
    reason: str
    last_layer: int
    """-1 before the first call."""
    calls: int
    """Layer calls this incarnation answered; a death of an incarnation with none counts against the restart cap."""
    resends: int
    dropped_replies: int
    device: str
    backend: str
    rung: str
    bytes: dict[str, int]
    pid: int


@codec.register
@dataclass(frozen=True)
class Status:
    """Coordinator -> launcher: everything, every time. `ranks` holds the fields of RankStatus in order."""

    state: str
    """starting (loading), ready (waits for a request), serving, stopped."""
    phase: str
    """For people: what is being loaded or waited for."""
    done_bytes: int
    total_bytes: int
    load_s: float
    requests_running: int
    requests_waiting: int
    last_layer: int
    report: list[str]
    """Build report lines; empty until every rank that can serve has said what it is."""
    ranks: list[list[int | str | dict[str, int]]]


@codec.register
@dataclass(frozen=True)
class Fatal:
    """Coordinator -> launcher: the run cannot go on; the launcher prints `error` and exits with `exit_code`."""

    exit_code: int
    error: str


def send(sock: socket.socket, message: Any, fds: tuple[int, ...] = ()) -> bool:
    """Send one packet without blocking. False when the peer's buffer is full; raises OSError when the peer is gone."""
    data = codec.encode(message)
    assert len(data) <= MAX_PACKET, len(data)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        sock.sendmsg([data], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except BlockingIOError:
        return False
    return True


def receive(sock: socket.socket) -> tuple[Any, list[int]] | None:
    """One packet without blocking: (message, descriptors), or None when there is none. Raises EOFError at the end."""
    room = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
    try:  # not socket.recv_fds: it ignores its flags before CPython 3.12
        data, ancillary, _flags, _address = sock.recvmsg(MAX_PACKET, room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    except ConnectionResetError as error:
        raise EOFError("the peer is gone") from error
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if not data:
        raise EOFError("the peer is gone")
    return codec.decode(data), list(fds)
