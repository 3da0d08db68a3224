"""Log files: one per process and attempt, in $XDG_STATE_HOME/evrun/NAME.

    worker-0.2.log      rank 0, second attempt of the run; worker-0.log is a link to the newest attempt
    coordinator.1.log, launcher.1.log, http.1.log, and their links
    previous-1/         the files of the run before, previous-2/ of the one before that, ...

The files stay when the run is over. The newest KEEP_ATTEMPTS of a process and KEEP_RUNS older runs are kept.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from evrun.expert_worker.wire.errors import UsageError

KEEP_ATTEMPTS = 20
KEEP_RUNS = 3
FOLLOW_S = 0.1
_FILE = re.compile(r"(worker-\d+|coordinator|launcher|http)(\.(\d+))?\.log")
_LINE = re.compile(r"\S+ \S+ \S+ \S+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")


def log_folder(name: str, env: Mapping[str, str]) -> Path:
    """Where the logs of a run of this name are. Makes nothing."""
    state = env.get("XDG_STATE_HOME")
    if not state or not os.path.isabs(state):
        state = os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(state) / "evrun" / name


def process_name(role: str, rank: int | None) -> str:
    """`worker-3`, `coordinator`, `launcher`, `http`."""
    return role if rank is None else f"{role}-{rank}"


class LogFolder:
    """The log files of the run that this process launches."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: Path) -> LogFolder:
        """Make the folder and set the files of the last run aside. Raises UsageError where that cannot be written.

        A full disk is no reason to refuse: lines are lost then, and said to be.
        """
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "no permission to write")
            _set_aside(path)
        except OSError as error:
            found = f"cannot be written to: {error.strerror}"
            raise UsageError(f"log folder {path}: {found}; set XDG_STATE_HOME to a folder of yours") from None
        return cls(path)

    def file(self, role: str, rank: int | None, attempt: int) -> str:
        return str(self.path / f"{process_name(role, rank)}.{attempt}.log")

    def create(self, role: str, rank: int | None, attempt: int) -> int:
        """Descriptor of the attempt's new file, appended to. Raises OSError (a full disk may have no room for its name)."""
        name = process_name(role, rank)
        file = f"{name}.{attempt}.log"
        fd = os.open(self.path / file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with contextlib.suppress(OSError):
            link = self.path / f".{name}.log.new"
            link.unlink(missing_ok=True)
            link.symlink_to(file)
            link.replace(self.path / f"{name}.log")
        if attempt > KEEP_ATTEMPTS:
            with contextlib.suppress(OSError):
                os.unlink(self.path / f"{name}.{attempt - KEEP_ATTEMPTS}.log")
        return fd


def _set_aside(path: Path) -> None:
    files = [entry.name for entry in os.scandir(path) if _FILE.fullmatch(entry.name)]
    if not files:
        return
    shutil.rmtree(path / f"previous-{KEEP_RUNS}", ignore_errors=True)
    for number in range(KEEP_RUNS - 1, 0, -1):
        with contextlib.suppress(FileNotFoundError):
            os.replace(path / f"previous-{number}", path / f"previous-{number + 1}")
    try:
        (path / "previous-1").mkdir(mode=0o700)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        for file in files:  # no room even for a folder: the old lines make room for the new ones
            os.unlink(path / file)
        return
    for file in files:
        os.replace(path / file, path / "previous-1" / file)


def last_words(file: str, lines: int = 1) -> list[str]:
    """The text of the last lines that say something, without time and names; the worst level among the last 20 wins.

    For messages about a process that ended: its error, if it logged one, else its last line.
    """
    try:
        with open(file, "rb") as log:
            log.seek(max(0, os.path.getsize(file) - (64 << 10)))
            tail = log.read().decode(errors="replace").splitlines()[-20:]
    except OSError:
        return []
    parsed = [(m.group(1), m.group(2)) if (m := _LINE.fullmatch(line)) else ("", line) for line in tail if line.strip()]
    for level in ("CRITICAL", "ERROR"):
        matching = [text for found, text in parsed if found == level]
        if matching:
            return matching[-lines:]
    return [text for _, text in parsed][-lines:]


def attempts(path: Path, process: str) -> list[int]:
    """Attempts of `worker-3`, `coordinator` or `launcher` whose files are there, ascending."""
    with contextlib.suppress(OSError):
        found = (_FILE.fullmatch(entry.name) for entry in os.scandir(path))
        return sorted(int(m.group(3)) for m in found if m and m.group(1) == process and m.group(3))
    return []


def find_file(path: Path, process: str, attempt: int | None) -> Path:
    """The file of an attempt, the newest by default. Raises UsageError that lists what is there."""
    there = attempts(path, process)
    if not there:
        known = sorted({m.group(1) for entry in os.scandir(path) if (m := _FILE.fullmatch(entry.name))}) if path.is_dir() else []
        raise UsageError(f"no log of {process} in {path}; there are logs of: {', '.join(known) or 'nothing'}")
    if attempt is not None and attempt not in there:
        raise UsageError(f"no attempt {attempt} of {process} in {path}; there are attempts {', '.join(map(str, there))}")
    return path / f"{process}.{attempt or there[-1]}.log"


def follow(path: Path, process: str, attempt: int | None, over: Iterator[bool]) -> Iterator[bytes]:
    """What is in the file and what is added to it, then the newer attempts if none was asked for.

    Ends after everything was read once `over` says that the run is. Raises UsageError as `find_file`.
    """
    current = find_file(path, process, attempt)
    file: BinaryIO = open(current, "rb")  # noqa: SIM115 - replaced as attempts come
    try:
        while True:
            ended = next(over)
            newest = current if attempt is not None else find_file(path, process, None)
            while data := file.read(1 << 16):
                yield data
            if newest != current:
                file.close()
                current, file = newest, open(newest, "rb")  # noqa: SIM115
            elif ended:
                return
            else:
                time.sleep(FOLLOW_S)
    finally:
        file.close()
