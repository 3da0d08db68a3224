from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from evrun.expert_worker.wire.errors import UsageError
from evrun.launch import run_dir
from evrun.launch.process import start_time
from evrun.launch.run_dir import RunDir, RunInfo, base_dir, end_leftovers, find_run

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


@pytest.fixture
def base() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ev", dir="/tmp") as folder:
        yield Path(folder) / "evrun"


def info(name: str = "a", pid: int | None = None) -> RunInfo:
    pid = os.getpid() if pid is None else pid
    return RunInfo("12345678", name, pid, start_time(pid) or 0, "s", "ipc://x", "/x", "/l", 2, "sorted", "exact", "reference", "float32")


def test_base_is_the_runtime_folder_or_a_private_one_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = tmp_path / f"evrun-{os.geteuid()}"
    assert base_dir({}) == (mine, None)
    assert base_dir({"XDG_RUNTIME_DIR": str(tmp_path)}) == (tmp_path / "evrun", None)
    missing, note = base_dir({"XDG_RUNTIME_DIR": str(tmp_path / "no")})
    assert missing == mine
    assert note is not None
    assert "cannot be used" in note
    assert base_dir({"XDG_RUNTIME_DIR": "relative"})[0] == mine


def test_everything_is_gone_afterwards(base: Path) -> None:
    with RunDir.acquire(base, "a") as made:
        made.write("worker-0.1.json", "{}")
        made.write_info(info())
        made.note_process("worker-0", 1, 2)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(made.socket_path("control"))
        for file in made.path.iterdir():
            assert file.stat().st_mode & 0o077 == 0 or file.is_socket()
        assert base.stat().st_mode & 0o777 == made.path.stat().st_mode & 0o777 == 0o700
        assert len(os.fsencode(made.socket_path("requests"))) < 107
        assert made.run_id in made.socket_path("hub")
    assert not base.exists()


def test_a_running_name_is_refused_with_its_pid(base: Path) -> None:
    with RunDir.acquire(base, "a"):
        with pytest.raises(UsageError, match=f"run 'a' is already running, launcher pid {os.getpid()}"):
            RunDir.acquire(base, "a")
        with RunDir.acquire(base, "b") as other:
            assert other.path.name == "b"
    with RunDir.acquire(base, "a"):
        pass


def test_the_lock_ends_with_its_process(base: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from evrun.launch.run_dir import RunDir
made = RunDir.acquire(Path({str(base)!r}), "a")
made.write("coordinator.1.json", "secret")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -signal.SIGKILL
    (base / "a" / "notes.txt").write_text("mine")
    with RunDir.acquire(base, "a") as made:
        assert sorted(p.name for p in made.path.iterdir()) == ["lock", "notes.txt"]
        assert made.notes == [f"{made.path}: left alone, not ours: notes.txt"]
    assert [p.name for p in (base / "a").iterdir()] == ["notes.txt"]


def test_links_in_our_place_are_not_followed(base: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (base / "a").mkdir(parents=True)
    base.chmod(0o700)
    (base / "a").chmod(0o700)
    for name in ("run.json", "processes", "coordinator.1.json"):
        (base / "a" / name).symlink_to(victim)
    made = RunDir.acquire(base, "a")
    with pytest.raises(OSError, match="Too many levels"):
        made.note_process("worker-0", 1, 2)
    made.write_info(info())  # replaces the link itself
    made.release()
    assert victim.read_text() == "precious"
    (base / "b").mkdir(mode=0o700)
    (base / "b" / "lock").symlink_to(victim)
    with pytest.raises(UsageError, match="cannot be made"):
        RunDir.acquire(base, "b")
    (base / "c").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="expected a folder, found a link"):
        RunDir.acquire(base, "c")


def test_folders_open_to_others_are_refused(base: Path) -> None:
    (base / "a").mkdir(parents=True, mode=0o700)
    base.chmod(0o755)
    with pytest.raises(UsageError, match="expected mode 0700, found 0755"):
        RunDir.acquire(base, "a")


@root_only
def test_folders_and_files_of_others_are_not_touched(base: Path) -> None:
    base.mkdir(mode=0o700)
    (base / "a").mkdir(mode=0o700)
    stale = base / "a" / "coordinator.1.json"
    stale.write_text("theirs")
    os.chown(stale, 12345, 12345)
    RunDir.acquire(base, "a").release()
    assert stale.read_text() == "theirs"
    os.chown(base / "a", 12345, 12345)
    with pytest.raises(UsageError, match="found one of user 12345"):
        RunDir.acquire(base, "a")


def test_socket_paths_that_are_too_long(base: Path) -> None:
    with pytest.raises(UsageError, match="bytes, at most 107"):
        RunDir.acquire(base / ("x" * 60), "y" * 32)


def test_finding_a_run(base: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(base.parent)}
    with pytest.raises(UsageError, match="no run named 'a'"):
        find_run("a", env)
    with RunDir.acquire(base, "a") as made:
        with pytest.raises(UsageError, match="no run named 'a'"):
            find_run("a", env)
        made.write_info(info())
        assert find_run("a", env) == info()
        made.write_info(dataclasses.replace(info(), launcher_started=1))
        with pytest.raises(UsageError, match=f"is over: its launcher, pid {os.getpid()}, is gone"):
            find_run("a", env)
        made.write("run.json", json.dumps({"run_id": "x"}))
        with pytest.raises(UsageError, match="of another version"):
            find_run("a", env)


def test_leftovers_of_a_killed_launcher_are_ended(tmp_path: Path) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        record = tmp_path / "processes"
        boot, started = run_dir._boot_id(), start_time(sleeper.pid)
        lines = [[boot, os.getpid(), 1, "another start time"], ["another boot", os.getpid(), start_time(os.getpid()), "x"]]
        record.write_text("".join(json.dumps(line) + "\n" for line in lines) + "junk\n[]\n")
        assert end_leftovers(record, wait_s=0.05) == []
        assert sleeper.poll() is None
        record.write_text(json.dumps([boot, sleeper.pid, started, "worker-0"]) + "\n")
        assert end_leftovers(record, wait_s=0.2) == []
        assert sleeper.wait(timeout=10) == -signal.SIGKILL
    finally:
        sleeper.kill()
        sleeper.wait()
    assert end_leftovers(tmp_path / "none") == []
