"""The run directory: one folder a name, locked by its launcher, holding sockets, spec files and what clients need.

    BASE/NAME/lock                     held by the launcher (flock); the pid in it is for messages
    BASE/NAME/run.json                 what clients need to reach the run (0600: it holds the secret)
    BASE/NAME/processes                pid and start time of every child, for the next launch after a crash
    BASE/NAME/{hub,requests,control}-RUN.sock, worker-R.K.json, coordinator.K.json, http.K.json

BASE is $XDG_RUNTIME_DIR/evrun, else `evrun-UID` under the temporary folder. Only files of these names are ever removed;
folders that are links, belong to somebody else or are open to others are refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import secrets
import signal
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evrun.expert_worker.wire.errors import UsageError
from evrun.launch import process

MAX_SOCKET_PATH = 107
"""Bytes of an AF_UNIX path, its end included."""
OURS = re.compile(r"lock|processes|run\.json(\.new)?|(hub|requests|control)-[0-9a-f]{8}\.sock|(worker-\d+|coordinator|http)\.\d+\.json")
LEFTOVER_WAIT_S = 3.0
LOCK_WAIT_S = 0.3


def base_dir(env: Mapping[str, str]) -> tuple[Path, str | None]:
    """(BASE, why $XDG_RUNTIME_DIR is not used although it is set). Makes nothing."""
    fallback = Path(tempfile.gettempdir()) / f"evrun-{os.geteuid()}"
    runtime = env.get("XDG_RUNTIME_DIR")
    if not runtime:
        return fallback, None
    try:
        found = os.stat(runtime)
    except OSError as error:
        return fallback, f"XDG_RUNTIME_DIR={runtime} cannot be used ({error.strerror}); run files are under {fallback}"
    if not os.path.isabs(runtime) or not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return fallback, f"XDG_RUNTIME_DIR={runtime} is no folder of this user; run files are under {fallback}"
    return Path(runtime) / "evrun", None


@dataclass(frozen=True)
class RunInfo:
    """run.json: how to reach a run, and what about it never changes."""

    run_id: str
    name: str
    launcher_pid: int
    launcher_started: int
    """Clock ticks since boot, as process.start_time."""
    secret: str
    control_address: str
    requests_path: str
    log_dir: str
    world: int
    deal: str
    combine: str
    numerics: str
    dtype: str

    @property
    def is_running(self) -> bool:
        return process.is_alive(self.launcher_pid, self.launcher_started)


def find_run(name: str, env: Mapping[str, str]) -> RunInfo:
    """The running run of this name. Raises UsageError when there is none, or its files are not this user's."""
    folder = base_dir(env)[0] / name
    try:
        check_private(folder.parent)
        check_private(folder)
        fd = os.open(folder / "run.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UsageError(f"no run named {name!r} (nothing in {folder}); start one with `evrun launch --name {name}`") from None
    except OSError as error:
        raise UsageError(f"run {name!r}: {folder / 'run.json'} cannot be read: {error.strerror}") from None
    with os.fdopen(fd, encoding="utf-8") as file:
        if os.fstat(fd).st_uid != os.geteuid():
            raise UsageError(f"run {name!r}: {folder / 'run.json'} belongs to another user; not touched")
        try:
            info = RunInfo(**json.load(file))
        except (ValueError, TypeError):
            raise UsageError(f"run {name!r}: {folder / 'run.json'} is of another version of evrun; stop that run with it") from None
    if not info.is_running:
        raise UsageError(f"run {name!r} is over: its launcher, pid {info.launcher_pid}, is gone; start it anew with `evrun launch`")
    return info


def check_private(folder: Path) -> None:
    """Raises UsageError unless this is a real folder, this user's alone. FileNotFoundError when it is not there."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{folder}: expected a folder, found {'a link' if stat.S_ISLNK(found.st_mode) else 'a file'}; remove it")
    if found.st_uid != os.geteuid():
        raise UsageError(f"{folder}: expected a folder of user {os.geteuid()}, found one of user {found.st_uid}; set XDG_RUNTIME_DIR")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise UsageError(f"{folder}: expected mode 0700, found {stat.S_IMODE(found.st_mode):04o}; run `chmod 700 {folder}`")


def _make_private(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    check_private(folder)


class RunDir:
    """The locked folder of the run that this process launches. Use as a context manager: leaving removes it."""

    def __init__(self, path: Path, lock_fd: int, run_id: str) -> None:
        self.path = path
        self.run_id = run_id
        self.notes: list[str] = []
        """What reclaiming found, for people."""
        self._lock_fd = lock_fd

    @classmethod
    def acquire(cls, base: Path, name: str) -> RunDir:
        """Lock BASE/NAME and clear what a dead run left there.

        Raises UsageError: the name is running (with its pid), the folder is not private, the socket paths are too long.
        """
        path = base / name
        run_id = secrets.token_hex(4)
        longest = len(os.fsencode(path / f"requests-{run_id}.sock")) + 1
        if longest > MAX_SOCKET_PATH:
            over = f"{path} gives socket paths of {longest} bytes, at most {MAX_SOCKET_PATH}"
            raise UsageError(f"{over}; set XDG_RUNTIME_DIR or TMPDIR to a shorter folder")
        try:
            run_dir = cls(path, _lock(base, path, name), run_id)
        except OSError as error:
            raise UsageError(f"run folder {path}: cannot be made: {error.strerror}; set XDG_RUNTIME_DIR to a folder of yours") from None
        try:
            run_dir._reclaim()
        except BaseException:
            run_dir.release()
            raise
        return run_dir

    def socket_path(self, what: str) -> str:
        """`hub`, `requests` or `control`."""
        return str(self.path / f"{what}-{self.run_id}.sock")

    def write(self, file_name: str, text: str) -> str:
        """Write one of our files whole, 0600; its path. Raises OSError."""
        assert OURS.fullmatch(file_name), file_name
        new, path = self.path / (file_name + ".new"), self.path / file_name
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(new, path)
        return str(path)

    def remove(self, file_name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / file_name)

    def write_info(self, info: RunInfo) -> None:
        self.write("run.json", json.dumps(dataclasses.asdict(info)))

    def note_process(self, who: str, pid: int, started: int) -> None:
        """Remember a child, in case this launcher is killed before it can end it."""
        fd = os.open(self.path / "processes", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(json.dumps([_boot_id(), pid, started, who]) + "\n")

    def release(self) -> None:
        """Remove the run's files, the folder if nothing else is in it, and give the lock back."""
        with contextlib.suppress(OSError):
            self._clear(keep_lock=False)
            os.rmdir(self.path)
            os.rmdir(self.path.parent)
        os.close(self._lock_fd)

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()

    def _reclaim(self) -> None:
        self.notes += end_leftovers(self.path / "processes")
        self._clear(keep_lock=True)
        strange = sorted(entry.name for entry in os.scandir(self.path) if entry.name != "lock")
        if strange:
            self.notes.append(f"{self.path}: left alone, not ours: {', '.join(strange)}")

    def _clear(self, keep_lock: bool) -> None:
        """Remove what has a name of ours and is a file or socket of this user; the lock last."""
        entries = [e for e in os.scandir(self.path) if OURS.fullmatch(e.name.removesuffix(".new"))]
        for entry in sorted(entries, key=lambda e: e.name == "lock"):
            found = entry.stat(follow_symlinks=False)
            plain = stat.S_ISREG(found.st_mode) or stat.S_ISSOCK(found.st_mode)
            if plain and found.st_uid == os.geteuid() and not (keep_lock and entry.name == "lock"):
                os.unlink(entry.path)


def _lock(base: Path, path: Path, name: str) -> int:
    """Descriptor of BASE/NAME/lock, locked for this process. Raises UsageError when another holds it; OSError.

    Launchers that leave remove lock and folders, so each step may find its ground gone; then it starts over.
    """
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            _make_private(base)
            _make_private(path)
            fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == os.stat(path / "lock").st_ino:
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        except FileNotFoundError:
            pass  # locked a file that its last owner has just removed
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                raise UsageError(f"run {name!r} is already running, launcher pid {holder}; stop it or choose another --name") from None
            time.sleep(0.02)
        os.close(fd)


def end_leftovers(record: Path, wait_s: float = LEFTOVER_WAIT_S) -> list[str]:
    """Wait for the children of a launcher that was killed, then kill them; lines about any that would not go.

    They end by themselves (parent-death signal, end of their lifeline); this covers the ones that could not.
    """
    try:
        lines = record.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    known: list[tuple[int, int, str]] = []
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):
            boot, pid, started, who = json.loads(line)
            if boot == _boot_id():
                known.append((int(pid), int(started), str(who)))

    def alive() -> list[tuple[int, int, str]]:
        return [(pid, started, who) for pid, started, who in known if process.is_alive(pid, started)]

    for number in (None, signal.SIGKILL):
        for pid, started, _ in alive() if number is not None else ():
            _kill_exactly(pid, started)
        deadline = time.monotonic() + wait_s
        while alive() and time.monotonic() < deadline:
            time.sleep(0.02)
    return [f"{who} of the last run, pid {pid}, could not be killed (state {process.run_state(pid)})" for pid, _, who in alive()]


def _kill_exactly(pid: int, started: int) -> None:
    """SIGKILL to this very process: the identity is checked again after the pidfd holds it."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if process.is_alive(pid, started):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
