"""One child process: started with a log file and a few descriptors, watched by pidfd, reaped once.

A process is known by (pid, start time), so a reused pid is never taken for it. Signals go through the pidfd. The child
leads its own session, so a terminal's Ctrl-C does not reach it; what it left in its group is killed before it is reaped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evrun.launch.settings import ENV_PREFIX

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Exit:
    """How a process ended."""

    code: int | None
    signal: int | None

    @classmethod
    def of(cls, returncode: int) -> Exit:
        """From Popen.returncode: negative means a signal."""
        return cls(None, -returncode) if returncode < 0 else cls(returncode, None)

    def __str__(self) -> str:
        if self.signal is None:
            return f"exited with {self.code}"
        try:
            return f"killed by {signal.Signals(self.signal).name}"
        except ValueError:
            return f"killed by signal {self.signal}"


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which the process started, or None when there is none. A zombie is still there."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def run_state(pid: int) -> str:
    """The letter of /proc: R, S, D (uninterruptible), T, Z, ...; empty when there is no such process."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def is_alive(pid: int, started: int) -> bool:
    """Whether this very process runs (a zombie does not)."""
    fields = _stat(pid)
    return bool(fields) and int(fields[19]) == started and fields[0] not in "ZX"


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on: the name before them may hold anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()


def child_environment(env: Mapping[str, str], threads: int) -> dict[str, str]:
    """The caller's environment without our settings (children have a spec), threads of numeric libraries limited.

    Relative entries of PYTHONPATH become absolute, because the child starts in another folder.
    """
    child = {name: value for name, value in env.items() if not name.startswith(ENV_PREFIX)}
    child.update({name: str(threads) for name in THREAD_VARIABLES})
    if child.get("PYTHONPATH"):
        child["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in child["PYTHONPATH"].split(os.pathsep) if part)
    return child


class Process:
    """A running (or just ended) child. Made by `start`; `reap` and then `close` end its life here."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid
        # Before the first reap the pid cannot be reused, so both of these are about our child.
        try:
            self.pidfd = os.pidfd_open(popen.pid)
        except OSError:
            popen.kill()  # a process that cannot be watched must not be
            popen.wait()
            raise
        self.started = start_time(popen.pid) or 0

    @classmethod
    def start(cls, module: Sequence[str], argument: str, fds: Sequence[int], log_fd: int, folder: str, env: Mapping[str, str]) -> Process:
        """Run `python -m MODULE ARGUMENT` with stdout and stderr on `log_fd` and nothing inherited but `fds`.

        module  arguments of the interpreter, usually ("-m", "evrun.expert_worker")
        Raises OSError when no process can be made.
        """
        popen = subprocess.Popen(
            [sys.executable, *module, argument],
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            pass_fds=tuple(fd for fd in fds if fd >= 0),
            cwd=folder,
            env=dict(env),
            start_new_session=True,
        )
        return cls(popen)

    def send(self, number: int) -> bool:
        """Send a signal; False when the process has ended."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def reap(self) -> Exit | None:
        """Its exit, once it has ended; None while it runs."""
        if self._popen.returncode is None and run_state(self.pid) in ("Z", "X"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        code = self._popen.poll()
        return None if code is None else Exit.of(code)

    def close(self) -> None:
        """Only after `reap` gave an exit."""
        assert self._popen.returncode is not None
        os.close(self.pidfd)
