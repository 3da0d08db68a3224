"""One request to a running coordinator, from connect to the last word.

Bytes only (`send_bytes`, `recv_bytes` with a limit), messages of `wire.requests`. Closing the connection cancels; so
does a readable `cancel_fd`.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any, Protocol

from evrun.expert_worker.wire.codec import MAX_BYTES, CodecError
from evrun.expert_worker.wire.errors import RUNNING, RunError
from evrun.expert_worker.wire.requests import Cancel, Finished, Generate, Prefill, Queued, Refused, Started, Token, codec
from evrun.launch.report import Result

CONNECT_WITHIN_S = 10.0


class CancelledError(Exception):
    """The request was given up from this side."""


class Listener(Protocol):
    """Who follows an answer as it comes."""

    def queued(self, ahead: int) -> None: ...

    def started(self, started: Started) -> None: ...

    def prefill(self, done: int, total: int) -> None: ...

    def token(self, token: Token) -> None: ...


def request(
    path: str, secret: str, message: Generate, listener: Listener, cancel_fd: int = -1, why_lost: Callable[[], str] = str
) -> Result:
    """Send one request and follow it to its end. What goes wrong is in the result.

    why_lost  gives the cause when the coordinator vanishes, as far as it is known
    Raises RunError when the coordinator cannot be reached, CancelledError when cancel_fd became readable; whatever the
    listener raises (and KeyboardInterrupt) passes through, and the request is cancelled.
    """
    connection = connect(path, secret)
    try:
        return _follow(connection, message, listener, cancel_fd, why_lost)
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send_bytes(codec.encode(Cancel("the client gave up")))
        raise
    finally:
        connection.close()


def _follow(connection: Connection, message: Generate, listener: Listener, cancel_fd: int, why_lost: Callable[[], str]) -> Result:
    result = Result()
    asked = codec.encode(message)
    while result.finished is None and result.error is None:
        try:
            if asked:
                connection.send_bytes(asked)
                asked = b""
            ready = wait([connection, cancel_fd] if cancel_fd >= 0 else [connection])
            said = codec.decode(connection.recv_bytes(MAX_BYTES)) if connection in ready else None
        except (EOFError, OSError, CodecError) as error:
            cause = why_lost() or str(error) or "it is gone"
            result.fail(RUNNING, f"the coordinator was lost during the request: {cause}")
            return result
        if cancel_fd in ready:
            raise CancelledError
        _take(said, result, listener)
    return result


def _take(said: Any, result: Result, listener: Listener) -> None:
    """One message of the coordinator. What the listener raises (nobody reads stdout, Ctrl-C) is the caller's."""
    if isinstance(said, Queued):
        listener.queued(said.ahead)
    elif isinstance(said, Started):
        result.started = said
        listener.started(said)
    elif isinstance(said, Prefill):
        listener.prefill(said.done, said.total)
    elif isinstance(said, Token):
        result.take(said)
        listener.token(said)
    elif isinstance(said, Finished):
        result.finish(said)
    elif isinstance(said, Refused):
        result.fail(said.exit_code, said.error)


def connect(path: str, secret: str) -> Connection:
    """A connection on which both sides have shown that they know the secret. Raises RunError."""
    connection = Connection(_reach(path).detach())
    try:
        if not connection.poll(CONNECT_WITHIN_S):
            raise RunError(f"the coordinator did not answer within {CONNECT_WITHIN_S:g} s; see `evrun ps`")
        answer_challenge(connection, secret.encode())
        deliver_challenge(connection, secret.encode())
    except (AuthenticationError, EOFError, OSError) as error:
        connection.close()
        raise RunError(
            f"the coordinator turned this client away: {str(error) or type(error).__name__}; see `evrun logs coordinator`"
        ) from None
    except BaseException:
        connection.close()
        raise
    return connection


def _reach(path: str) -> socket.socket:
    deadline = time.monotonic() + CONNECT_WITHIN_S
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(path)
        except BlockingIOError:  # its queue of clients is full
            sock.close()
            if time.monotonic() > deadline:
                raise RunError(f"the coordinator took no client within {CONNECT_WITHIN_S:g} s; see `evrun ps`") from None
            time.sleep(0.05)
            continue
        except OSError as error:
            sock.close()
            raise RunError(f"the coordinator cannot be reached at {path}: {error.strerror}; see `evrun ps`") from None
        sock.setblocking(True)
        return sock
