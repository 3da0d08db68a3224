from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evrun.expert_worker.wire.errors import RunError, UsageError
from evrun.launch import control
from evrun.launch.control import ControlServer, Done, Kill, Processes, Ps, Restart, Stop, Wrong, ask, codec
from evrun.launch.process import start_time
from evrun.launch.run_dir import RunInfo

SECRET = "0123456789abcdef"


def handle(command: Any) -> Any:
    if isinstance(command, Kill):
        raise UsageError("rank: expected 0 to 1, found 7")
    if isinstance(command, Restart):
        raise RunError("no")
    return Processes("{}") if isinstance(command, Ps) else Done("stopping")


class Loop:
    """A server with the loop that it belongs to, in a thread."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.server = ControlServer(path, SECRET, handle)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            if self.server.socket.poll(20):
                self.server.serve()
        self.server.close()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def info(self, secret: str = SECRET, started: int | None = None) -> RunInfo:
        began = (start_time(os.getpid()) or 0) if started is None else started
        return RunInfo("r", "a", os.getpid(), began, secret, f"ipc://{self.path}", "/x", "/l", 2, "sorted", "exact", "reference", "float32")


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    with tempfile.TemporaryDirectory(prefix="ev", dir="/tmp") as folder:
        made = Loop(f"{folder}/control.sock")
        try:
            yield made
        finally:
            made.close()


def test_commands_and_their_answers(loop: Loop) -> None:
    assert ask(loop.info(), Ps()) == Processes("{}")
    assert ask(loop.info(), Stop("x")) == Done("stopping")
    with pytest.raises(UsageError, match="found 7"):
        ask(loop.info(), Kill(7, 9, False))
    with pytest.raises(RunError, match=r"^no$"):
        ask(loop.info(), Restart(0))


def test_the_socket_is_this_users_alone(loop: Loop) -> None:
    assert Path(loop.path).stat().st_mode & 0o777 == 0o600


def test_a_wrong_secret_gets_no_answer(loop: Loop) -> None:
    with pytest.raises(RunError, match=r"no answer within 0.2 s"):
        ask(loop.info(secret="guess"), Ps(), within_s=0.2)
    with pytest.raises(UsageError, match="is over: its launcher"):
        ask(loop.info(secret="guess", started=1), Ps(), within_s=0.2)


FRAMES = st.lists(st.binary(max_size=200), max_size=4)
KNOWN_SECRET = st.binary(max_size=200).map(lambda b: [SECRET.encode(), b])
NO_COMMAND = st.sampled_from([Done("x"), Processes("{}"), Wrong(2, "x")]).map(lambda m: [SECRET.encode(), codec.encode(m)])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=st.one_of(FRAMES, KNOWN_SECRET, NO_COMMAND))
def test_junk_is_counted_dropped_and_answered_by_nothing(loop: Loop, junk: list[bytes]) -> None:
    before = loop.server.junk
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(f"ipc://{loop.path}")
        if junk:
            socket.send_multipart(junk)
        # Messages of one client stay in order, so the answer to this one comes first if the junk got none.
        socket.send_multipart([SECRET.encode(), codec.encode(Stop("after the junk"))])
        assert codec.decode(socket.recv()) == Done("stopping")
    assert loop.server.junk == before + bool(junk)


def test_a_message_that_is_too_long_only_costs_its_sender_the_connection(loop: Loop) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{loop.path}")
        socket.send_multipart([SECRET.encode(), b"x" * (control.MAX_REQUEST_BYTES + 1)])
        assert ask(loop.info(), Ps()) == Processes("{}")
