"""SIGINT, SIGTERM and SIGHUP as something to read, not as something that happens anywhere.

A handler only appends to a list; the loop that waits on `fd` acts on it. Before there is a loop (`raising`), a signal
raises Interrupted in the main thread, so that what was made so far is undone on the way out.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked for the end. Not an Exception, as KeyboardInterrupt is not."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


class Signals:
    """Installed while in the `with` block, which the main thread must enter."""

    def __init__(self) -> None:
        self.raising = True
        self._received: list[int] = []
        self._before: dict[int, Any] = {}
        self.fd, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        """Readable when a signal came or `wake` was called."""

    def wake(self) -> None:
        """From any thread: end the loop's wait."""
        with contextlib.suppress(OSError):  # full is as good; closed means that the loop is over
            os.write(self._write, b"\0")

    def take(self) -> list[int]:
        """Signals since the last call; empties the pipe."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass
        received, self._received = self._received, []
        return received

    def __enter__(self) -> Signals:
        for number in ENDING:
            if signal.getsignal(number) is signal.SIG_IGN and number == signal.SIGHUP:
                continue  # nohup
            self._before[number] = signal.signal(number, self._handle)
        # A signal that comes between two steps of Python ends the wait only through this descriptor.
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        fds, self.fd, self._write = (self.fd, self._write), -1, -1
        for fd in fds:
            os.close(fd)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.raising:
            self.raising = False  # once is enough; what follows is the way out
            raise Interrupted(number)
        self._received.append(number)
