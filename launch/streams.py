"""Standard streams that are closed from the start, whose reader is gone, or whose disk is full."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def complete() -> None:
    """Open what of 0, 1 and 2 is closed onto nothing, so that no descriptor of ours takes its place."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is fd
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", closefd=False))  # noqa: SIM115 - lives as long as the process


def drop(stream: TextIO) -> None:
    """Let what the stream still holds, and all that follows, go nowhere: the interpreter's last flush must not fail."""
    with contextlib.suppress(OSError, ValueError):
        fd = os.open(os.devnull, os.O_WRONLY)
        os.dup2(fd, stream.fileno())
        os.close(fd)


def settle() -> None:
    """Flush both; what cannot be flushed is dropped, because its failure would change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            drop(stream)
