from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from evrun.launch.process import Exit, Process, child_environment, is_alive, run_state, start_time


def start(tmp_path: Path, code: str, fds: tuple[int, ...] = ()) -> Process:
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        return Process.start(("-c",), code, fds, log, str(tmp_path), os.environ)
    finally:
        os.close(log)


def ended(process: Process) -> Exit:
    assert select.select([process.pidfd], [], [], 30)[0]
    found = process.reap()
    assert found is not None
    process.close()
    return found


@pytest.mark.parametrize(
    ("code", "words"),
    [("raise SystemExit(3)", "exited with 3"), ("pass", "exited with 0"), ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL")],
)
def test_how_it_ended(tmp_path: Path, code: str, words: str) -> None:
    assert str(ended(start(tmp_path, code))) == words


def test_it_inherits_what_it_is_given_and_leads_a_session(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    os.set_inheritable(read_fd, True)
    code = "import os; print(sorted(int(f) for f in os.listdir('/proc/self/fd')), os.getsid(0) == os.getpid(), os.getcwd())"
    assert ended(start(tmp_path, code, (write_fd,))).code == 0
    os.close(read_fd)
    os.close(write_fd)
    fds, _, rest = (tmp_path / "log").read_text().strip().partition("] ")
    listed = [int(fd) for fd in fds[1:].split(",")]
    assert listed[:3] == [0, 1, 2]
    assert write_fd in listed
    assert read_fd not in listed
    assert rest == f"True {tmp_path}"


def test_signals_and_identity(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; time.sleep(60)")
    assert process.reap() is None
    assert is_alive(process.pid, process.started)
    assert not is_alive(process.pid, process.started + 1)
    assert start_time(process.pid) == process.started
    assert process.send(signal.SIGTERM)
    assert select.select([process.pidfd], [], [], 30)[0]
    assert run_state(process.pid) == "Z"
    assert not is_alive(process.pid, process.started)
    assert ended(process) == Exit(None, signal.SIGTERM)
    assert run_state(process.pid) == ""
    assert start_time(process.pid) is None


def test_what_it_left_in_its_group_goes_with_it(tmp_path: Path) -> None:
    code = f"import subprocess, sys; p = subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(60)']); print(p.pid)"
    process = start(tmp_path, code)
    assert ended(process).code == 0
    grandchild = int((tmp_path / "log").read_text())
    deadline = time.monotonic() + 10
    while run_state(grandchild) not in ("", "Z"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_environment_of_a_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    env = {"EVRUN_WORLD": "3", "PATH": "/bin", "OMP_NUM_THREADS": "999", "PYTHONPATH": f"lib{os.pathsep}/abs"}
    child = child_environment(env, 2)
    assert child == {
        "PATH": "/bin", "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2",
        "PYTHONPATH": f"{tmp_path}/lib{os.pathsep}/abs",
    }  # fmt: skip
