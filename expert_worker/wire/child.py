"""A process of a run: its cores, its threads, and its end when the launcher ends. Comes before heavy imports."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent(launcher_pid: int) -> None:
    """Ask the kernel to kill this process when the launcher dies; exit at once when it died before this call.

    Call it from the main thread: the signal is tied to the parent's thread that started us, which is its main one.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher_pid:
        raise SystemExit("the launcher is gone")


def yield_wakeups() -> None:
    """Do not preempt who wakes us: a coordinator that shares a core rings every rank before the first one runs."""
    with contextlib.suppress(OSError):  # a container may forbid it; then calls are a little slower
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pin(cpus: list[int], threads: int) -> None:
    """Stay on `cpus`; thread pools of imported libraries get `threads`, unless the user set a number."""
    if cpus:
        with contextlib.suppress(OSError):  # a cpuset may have shrunk since the plan: the kernel's own choice is fine then
            os.sched_setaffinity(0, cpus)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, str(threads))
