from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from evrun.expert_worker.wire.errors import UsageError
from evrun.expert_worker.wire.logs import DescriptorHandler, LineFormatter
from evrun.launch import logs
from evrun.launch.logs import KEEP_ATTEMPTS, KEEP_RUNS, LogFolder, attempts, find_file, follow, last_words, log_folder


def write(folder: LogFolder, role: str, rank: int | None, attempt: int, text: str) -> None:
    fd = folder.create(role, rank, attempt)
    os.write(fd, text.encode())
    os.close(fd)


def test_a_line_says_when_who_and_which() -> None:
    record = logging.LogRecord("x", logging.WARNING, "f.py", 1, "a %s\nb", ("1",), None)
    lines = LineFormatter("worker", 2, 3).format(record).split("\n")
    assert len(lines) == 2
    for line, text in zip(lines, ("a 1", "b"), strict=True):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d worker 2 3 WARNING " + text, line), line
    assert " launcher - 1 WARNING " in LineFormatter("launcher", None, 1).format(record)


def test_a_full_disk_costs_lines_and_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    full = os.open("/dev/full", os.O_WRONLY)
    handler = DescriptorHandler(full, lambda error: said.append(str(error.strerror)))
    handler.setFormatter(LineFormatter("worker", 0, 1))
    logger = logging.Logger("full")
    logger.addHandler(handler)
    for _ in range(3):
        logger.error("lost")
    assert (handler.dropped, said) == (3, ["No space left on device"])
    handler.fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    logger.error("there is room again")
    os.close(full)
    os.close(handler.fd)
    lines = (tmp_path / "log").read_text().splitlines()
    assert "3 log line(s) before this one were lost" in lines[0]
    assert lines[1].endswith("there is room again")


def test_a_line_that_cannot_be_formatted_does_not_end_the_process(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb", buffering=0) as file:
        logger = logging.Logger("bad")
        logger.addHandler(DescriptorHandler(file.fileno()))
        logger.error("%d", "x")
    assert "could not be formatted" in (tmp_path / "log").read_text()


def test_one_file_per_attempt_and_a_link_to_the_newest(tmp_path: Path) -> None:
    folder = LogFolder.open(tmp_path / "evrun" / "a")
    for attempt in range(1, KEEP_ATTEMPTS + 4):
        write(folder, "worker", 3, attempt, f"{attempt}\n")
    assert attempts(folder.path, "worker-3") == list(range(4, KEEP_ATTEMPTS + 4))
    assert (folder.path / "worker-3.log").read_text() == f"{KEEP_ATTEMPTS + 3}\n"
    assert (folder.path / "worker-3.9.log").stat().st_mode & 0o777 == 0o600


def test_older_runs_are_set_aside_and_at_last_removed(tmp_path: Path) -> None:
    for run in range(KEEP_RUNS + 3):
        write(LogFolder.open(tmp_path), "coordinator", None, 1, f"run {run}\n")
        (tmp_path / "mine.txt").write_text("kept")
    last = KEEP_RUNS + 2
    assert (tmp_path / "coordinator.1.log").read_text() == f"run {last}\n"
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == [f"previous-{n}" for n in range(1, KEEP_RUNS + 1)]
    for n in range(1, KEEP_RUNS + 1):
        assert (tmp_path / f"previous-{n}" / "coordinator.1.log").read_text() == f"run {last - n}\n"
    assert (tmp_path / "mine.txt").read_text() == "kept"


def test_no_room_for_a_folder_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(LogFolder.open(tmp_path), "coordinator", None, 1, "old\n")

    def full(self: Path, mode: int = 0, parents: bool = False, exist_ok: bool = False) -> None:
        if self.name.startswith("previous"):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    LogFolder.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"log folder .*: cannot be written to: Not a directory; set XDG_STATE_HOME"):
        LogFolder.open(tmp_path / "file" / "evrun")


def test_where_logs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    assert log_folder("a", {"XDG_STATE_HOME": "/s"}) == Path("/s/evrun/a")
    assert log_folder("a", {}) == log_folder("a", {"XDG_STATE_HOME": "relative"}) == Path("/h/.local/state/evrun/a")


def test_last_words_are_the_error_if_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / "log"
    line = "2026-01-01T00:00:00.000+00:00 worker 0 1 {} {}\n".format
    file.write_text(line("INFO", "a") + line("ERROR", "no device") + line("INFO", "bye"))
    assert last_words(str(file)) == ["no device"]
    file.write_text(line("INFO", "a") + "Traceback\nModuleNotFoundError: No module named 'x'\n\n")
    assert last_words(str(file)) == ["ModuleNotFoundError: No module named 'x'"]
    file.write_text("")
    assert last_words(str(file)) == last_words(str(tmp_path / "none")) == []


def test_finding_a_file(tmp_path: Path) -> None:
    folder = LogFolder.open(tmp_path / "a")
    with pytest.raises(UsageError, match="there are logs of: nothing"):
        find_file(tmp_path / "none", "worker-0", None)
    write(folder, "worker", 0, 1, "")
    write(folder, "worker", 0, 2, "")
    assert find_file(folder.path, "worker-0", None).name == "worker-0.2.log"
    with pytest.raises(UsageError, match="there are attempts 1, 2"):
        find_file(folder.path, "worker-0", 3)
    with pytest.raises(UsageError, match="there are logs of: worker-0"):
        find_file(folder.path, "coordinator", None)


def test_following_goes_on_with_the_next_attempt_until_the_run_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "FOLLOW_S", 0.0)
    folder = LogFolder.open(tmp_path)
    write(folder, "worker", 0, 1, "one\n")

    def run() -> Iterator[bool]:
        yield False
        write(folder, "worker", 0, 1, "two\n")
        yield False
        write(folder, "worker", 0, 1, "three\n")
        write(folder, "worker", 0, 2, "four\n")
        yield False
        while True:
            yield True

    assert b"".join(follow(tmp_path, "worker-0", None, run())) == b"one\ntwo\nthree\nfour\n"
    assert b"".join(follow(tmp_path, "worker-0", 1, iter([True]))) == b"one\ntwo\nthree\n"
