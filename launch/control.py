"""Commands to a running launcher: ps, kill, restart, stop over a ZeroMQ socket in the run's folder.

A request is [the run's secret, one message of the codec]; anything else is junk: counted, dropped, never answered. The
server belongs to the launcher's loop and never blocks it.
"""

from __future__ import annotations

import hmac
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from evrun.expert_worker.wire.codec import Codec, CodecError
from evrun.expert_worker.wire.errors import EvrunError, RunError, UsageError
from evrun.launch.run_dir import RunInfo

codec = Codec("control")
MAX_REQUEST_BYTES = 4096
ANSWER_WITHIN_S = 5.0
log = logging.getLogger("control")


@codec.register
@dataclass(frozen=True)
class Ps:
    """Answered with Processes."""


@codec.register
@dataclass(frozen=True)
class Look:
    """Ps, and what the HTTP front end shows beside it: answered with Processes, whose text is
    {"ps": the object of `ps --json`, "phase", "done_bytes", "total_bytes", "requests_running", "requests_waiting",
    "calls": [[incarnation, layer calls answered] of each rank]}."""


@codec.register
@dataclass(frozen=True)
class Kill:
    """Send a signal to a rank's process; with `hold` the rank stays down afterwards."""

    rank: int
    signal: int
    hold: bool


@codec.register
@dataclass(frozen=True)
class Restart:
    rank: int


@codec.register
@dataclass(frozen=True)
class Stop:
    reason: str


@codec.register
@dataclass(frozen=True)
class Processes:
    """The object of `ps --json`, as JSON."""

    text: str


@codec.register
@dataclass(frozen=True)
class Done:
    text: str


@codec.register
@dataclass(frozen=True)
class Wrong:
    exit_code: int
    error: str


class ControlServer:
    """The launcher's end. `handle` gives the answer to a command or raises EvrunError."""

    def __init__(self, path: str, secret: str, handle: Callable[[Any], Any]) -> None:
        self._secret = secret.encode()
        self._handle = handle
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.junk = 0
        """Messages that were dropped."""
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self.socket.setsockopt(zmq.RCVHWM, 64)
        self.socket.setsockopt(zmq.SNDHWM, 64)
        self.socket.bind(f"ipc://{path}")
        os.chmod(path, 0o600)

    def serve(self) -> None:
        """Answer everything that has come in."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            answer = self._answer(frames[1:])
            if answer is not None:
                try:
                    self.socket.send_multipart([frames[0], codec.encode(answer)], zmq.NOBLOCK)
                except (zmq.ZMQError, CodecError) as error:
                    log.warning("a command's answer could not be sent: %s", error)

    def _answer(self, frames: list[bytes]) -> Any:
        if len(frames) != 2 or not hmac.compare_digest(frames[0], self._secret):
            return self._drop("not from a client of this run")
        try:
            command = codec.decode(frames[1])
        except CodecError as error:
            return self._drop(str(error))
        if not isinstance(command, Ps | Look | Kill | Restart | Stop):
            return self._drop(f"{type(command).__name__} is no command")
        try:
            return self._handle(command)
        except EvrunError as error:
            return Wrong(error.exit_code, str(error))

    def _drop(self, why: str) -> None:
        self.junk += 1
        if self.junk & (self.junk - 1) == 0:  # 1, 2, 4, ...: a flood of junk must not fill the log
            log.warning("control: dropped a message (%d so far): %s", self.junk, why)

    def close(self) -> None:
        self.socket.close()
        self._context.term()


def ask(info: RunInfo, command: Any, within_s: float = ANSWER_WITHIN_S) -> Any:
    """Send one command and wait for its answer. Raises the launcher's error, or RunError when it does not answer."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(within_s * 1000))
        socket.setsockopt(zmq.SNDTIMEO, int(within_s * 1000))
        socket.connect(info.control_address)
        try:
            socket.send_multipart([info.secret.encode(), codec.encode(command)])
            answer = codec.decode(socket.recv())
        except (zmq.Again, CodecError) as error:
            if not info.is_running:
                raise UsageError(f"run {info.name!r} is over: its launcher, pid {info.launcher_pid}, is gone") from None
            cause = str(error) if isinstance(error, CodecError) else f"no answer within {within_s:g} s"
            raise RunError(f"run {info.name!r}: its launcher, pid {info.launcher_pid}: {cause}; see `evrun logs launcher`") from None
    if isinstance(answer, Wrong):
        kind = {e.exit_code: e for e in (UsageError, RunError)}.get(answer.exit_code, RunError)
        raise kind(answer.error)
    return answer
