"""Log lines of every process: time, role, rank, incarnation, level, text, written straight to a descriptor.

    2026-01-31T12:00:00.123+00:00 worker 2 3 INFO ready after 0.41 s

rank is `-` for the coordinator and the launcher. A text of several lines (a traceback) gets the prefix on each of them,
so any line of any file says whose it is. Writing never fails: on a full disk lines are dropped and counted, and the
count is the first thing written once there is room again.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from types import TracebackType

STDERR = 2


class LineFormatter(logging.Formatter):
    """One prefixed line for each line of the record's text; no newline at the end."""

    def __init__(self, role: str, rank: int | None, incarnation: int) -> None:
        super().__init__()
        self._who = f"{role} {'-' if rank is None else rank} {incarnation}"

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        time = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        prefix = f"{time} {self._who} {record.levelname} "
        return "\n".join(prefix + line for line in text.splitlines() or [""])


class DescriptorHandler(logging.Handler):
    """Writes records to a descriptor without any buffer, so that nothing is left to fail when the process ends.

    `on_drop` is called once, with the error, when the first line is lost.
    """

    def __init__(self, fd: int, on_drop: Callable[[OSError], None] | None = None) -> None:
        super().__init__()
        self.fd = fd
        self.dropped = 0
        """Lines lost since start."""
        self._unsaid = 0
        self._on_drop = on_drop

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:
            text = f"log line from {record.pathname}:{record.lineno} could not be formatted"
        if self._unsaid and self._write(f"{self._unsaid} log line(s) before this one were lost"):
            self._unsaid = 0
        if not self._write(text):
            self._unsaid += 1
            self.dropped += 1

    def _write(self, text: str) -> bool:
        data = memoryview((text + "\n").encode(errors="backslashreplace"))
        try:
            while data:
                data = data[os.write(self.fd, data) :]
        except OSError as error:
            if self._on_drop is not None:
                say, self._on_drop = self._on_drop, None
                say(error)
            return False
        return True


def setup(role: str, rank: int | None, incarnation: int, level: str = "INFO") -> DescriptorHandler:
    """Send every log record, warning and uncaught exception of this process to stderr in the house's format.

    The launcher has pointed stderr of its children at their log file. Replaces the handlers of the root logger.
    """
    handler = DescriptorHandler(STDERR)
    handler.setFormatter(LineFormatter(role, rank, incarnation))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    return handler


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("evrun").critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread is not None else "thread"
    error = args.exc_value if args.exc_value is not None else args.exc_type()
    logging.getLogger("evrun").critical("in %s: %s", name, error, exc_info=(args.exc_type, error, args.exc_traceback))
