"""The client against a server of the request protocol in a thread."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Listener
from typing import Any

import pytest

from evrun.expert_worker.wire.errors import RunError
from evrun.expert_worker.wire.requests import Cancel, Finished, Prefill, Queued, Refused, Started, Token, codec
from evrun.launch import client
from evrun.launch.config import RequestConfig

FINISHED = Finished([4], "x", "length", "length", None, 0, 1.0, 1.0, 1.0, 1, 1, 0)
MESSAGE = RequestConfig(prompt_ids=(1,)).message()


class Recorder:
    def __init__(self) -> None:
        self.said: list[Any] = []

    def queued(self, ahead: int) -> None:
        self.said.append(("queued", ahead))

    def started(self, started: Started) -> None:
        self.said.append(started)

    def prefill(self, done: int, total: int) -> None:
        self.said.append((done, total))

    def token(self, token: Token) -> None:
        self.said.append(token)


class Server:
    """Takes one client and plays `part` with it."""

    def __init__(self, path: str, part: Callable[[Connection], Any]) -> None:
        self.heard: Any = None
        self._listener = Listener(path, "AF_UNIX", authkey=b"secret")
        self._thread = threading.Thread(target=self._run, args=(part,))
        self._thread.start()

    def _run(self, part: Callable[[Connection], Any]) -> None:
        try:
            with self._listener.accept() as connection:
                assert codec.decode(connection.recv_bytes()) == MESSAGE
                self.heard = part(connection)
        except (OSError, EOFError, client.AuthenticationError):
            pass

    def join(self) -> Any:
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._listener.close()
        return self.heard


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ev", dir="/tmp") as folder:
        yield f"{folder}/r.sock"


def say(connection: Connection, *messages: Any) -> None:
    for message in messages:
        connection.send_bytes(codec.encode(message))


def test_an_answer_from_the_first_to_the_last_word(path: str) -> None:
    started, token = Started([1], ["a"], "r"), Token(4, "x", [])
    server = Server(path, lambda c: say(c, Queued(2), started, Prefill(1, 1), token, FINISHED))
    listener = Recorder()
    result = client.request(path, "secret", MESSAGE, listener)
    server.join()
    assert listener.said == [("queued", 2), started, (1, 1), token]
    assert (result.started, result.finished, result.error) == (started, FINISHED, None)


def test_a_refusal(path: str) -> None:
    server = Server(path, lambda c: say(c, Refused(2, "16 requests are waiting already")))
    result = client.request(path, "secret", MESSAGE, Recorder())
    server.join()
    assert (result.exit_code, result.error) == (2, "16 requests are waiting already")


def test_a_coordinator_that_vanishes(path: str) -> None:
    server = Server(path, lambda c: say(c, Started([1], ["a"], "r"), Token(4, "x", [])))
    result = client.request(path, "secret", MESSAGE, Recorder(), why_lost=lambda: "killed by SIGKILL")
    server.join()
    assert result.exit_code == 5
    assert result.error == "the coordinator was lost during the request: killed by SIGKILL"
    assert (result.token_ids, result.text) == ([4], "x")


def test_a_coordinator_that_talks_nonsense(path: str) -> None:
    server = Server(path, lambda c: c.send_bytes(b"\x93\x01\xa4what"))
    result = client.request(path, "secret", MESSAGE, Recorder())
    server.join()
    assert result.exit_code == 5
    assert "not msgpack" in str(result.error)


def test_giving_up_says_so_and_closes(path: str) -> None:
    server = Server(path, lambda c: codec.decode(c.recv_bytes()))
    cancel_fd = os.eventfd(1)
    with pytest.raises(client.CancelledError):
        client.request(path, "secret", MESSAGE, Recorder(), cancel_fd)
    assert server.join() == Cancel("the client gave up")
    os.close(cancel_fd)


def test_an_interrupted_listener_cancels(path: str) -> None:
    class Interrupted(Recorder):
        def started(self, started: Started) -> None:
            raise KeyboardInterrupt

    server = Server(path, lambda c: (say(c, Started([1], ["a"], "r")), codec.decode(c.recv_bytes()))[1])
    with pytest.raises(KeyboardInterrupt):
        client.request(path, "secret", MESSAGE, Interrupted())
    assert server.join() == Cancel("the client gave up")


def test_a_broken_pipe_of_the_listener_is_no_lost_coordinator(path: str) -> None:
    class Unread(Recorder):
        def token(self, token: Token) -> None:
            raise BrokenPipeError

    server = Server(path, lambda c: (say(c, Token(1, "x", [])), codec.decode(c.recv_bytes()))[1])
    with pytest.raises(BrokenPipeError):
        client.request(path, "secret", MESSAGE, Unread())
    assert server.join() == Cancel("the client gave up")


def test_a_wrong_secret_is_turned_away(path: str) -> None:
    server = Server(path, lambda c: None)
    with pytest.raises(RunError, match="turned this client away"):
        client.request(path, "guess", MESSAGE, Recorder())
    server.join()


def test_nobody_there(path: str) -> None:
    with pytest.raises(RunError, match="cannot be reached"):
        client.request(path, "secret", MESSAGE, Recorder())
