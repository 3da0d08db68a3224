"""stdout and stderr when whoever read them is gone, or the disk under them is full."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


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
