"""What the launcher tells people while it works: notes, loading progress, the build report.

Two siblings behind one interface: `Terminal` writes to stderr, `Pipe` sends the same as JSON lines to the command that
waits for a detached run. Writing never fails the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO

PLAIN_EVERY_S = 3.0
LAST_WORD_S = 2.0
GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Loading:
    """How far a start is."""

    phase: str
    done_bytes: int
    total_bytes: int
    """0: not known yet, or nothing to load."""
    waiting_for: list[str]
    """`coordinator`, `rank 2`, ..."""


class Screen(Protocol):
    """Where the launcher's words go."""

    def note(self, text: str) -> None:
        """Something to know, marked as ours."""
        ...

    def line(self, text: str) -> None:
        """A line as it is."""
        ...

    def loading(self, loading: Loading) -> None: ...

    def ready(self, report: list[str]) -> None:
        """Every rank that can serve does; no more loading follows."""
        ...

    def close(self) -> None: ...


class Rate:
    """Bytes a second and seconds to go, from how a loading went so far."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def of(self, now_s: float, done: int, total: int) -> tuple[float, float] | None:
        """(bytes per second, seconds to go); None before anything moved."""
        if self._first is None:
            self._first = (now_s, done)
        since_s, since = self._first
        if now_s <= since_s or done <= since:
            return None
        rate = (done - since) / (now_s - since_s)
        return rate, max(0, total - done) / rate


def loading_text(loading: Loading, pace: tuple[float, float] | None) -> str:
    """`loading: dense tree: layer 3, 1.20 of 5.00 GiB, 800 MiB/s, 5 s to go; waiting for rank 1, rank 2`."""
    parts = [f"loading: {loading.phase}"]
    if loading.total_bytes:
        parts.append(sizes(loading.done_bytes, loading.total_bytes))
    if pace is not None and loading.done_bytes < loading.total_bytes:
        parts.append(pace_text(*pace))
    text = ", ".join(parts)
    return text + (f"; waiting for {', '.join(loading.waiting_for)}" if loading.waiting_for else "")


def pace_text(bytes_per_s: float, to_go_s: float) -> str:
    return f"{bytes_per_s / MIB:.3g} MiB/s, {to_go_s:.0f} s to go"


def sizes(done: int, total: int) -> str:
    unit, name = (GIB, "GiB") if total >= GIB else (MIB, "MiB")
    return f"{done / unit:.2f} of {total / unit:.2f} {name}"


class Terminal:
    """Lines on stderr; on a terminal a line that is rewritten in place while things load."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._is_tty = self._out.isatty()
        self._rate = Rate()
        self._bar: Any = None
        self._plain_at_s = -PLAIN_EVERY_S
        self._plain_text = ""

    def note(self, text: str) -> None:
        self._stop_bar()
        self._write(f"evrun: {text}")

    def line(self, text: str) -> None:
        self._stop_bar()
        self._write(text)

    def loading(self, loading: Loading) -> None:
        now_s = time.monotonic()
        pace = self._rate.of(now_s, loading.done_bytes, loading.total_bytes)
        if self._is_tty:
            with contextlib.suppress(OSError, ValueError):
                self._draw(loading, pace)
            return
        text = loading_text(loading, pace)
        if now_s - self._plain_at_s >= PLAIN_EVERY_S and text != self._plain_text:
            self._plain_at_s, self._plain_text = now_s, text
            self._write(text)

    def ready(self, report: list[str]) -> None:
        self._stop_bar()
        for line in report:
            self._write(line)

    def close(self) -> None:
        self._stop_bar()

    def _draw(self, loading: Loading, pace: tuple[float, float] | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        if self._bar is None:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[more]}", markup=False))
            self._bar = Progress(
                *columns, console=Console(file=self._out), auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._bar.add_task("", total=None, more="")
            self._bar.start()
        more = [sizes(loading.done_bytes, loading.total_bytes)] if loading.total_bytes else []
        if pace is not None and loading.done_bytes < loading.total_bytes:
            more.append(pace_text(*pace))
        if loading.waiting_for:
            more.append("waiting for " + ", ".join(loading.waiting_for))
        task = self._bar.task_ids[0]
        total = loading.total_bytes or None
        self._bar.update(task, description=loading.phase, completed=loading.done_bytes, total=total, more=", ".join(more))
        self._bar.refresh()

    def _stop_bar(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.stop()
            self._bar = None

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            self._out.write(text + "\n")
            self._out.flush()


class Pipe:
    """JSON lines to the command that started this launcher in the background, until that lets go of the pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        os.set_blocking(fd, False)

    def note(self, text: str) -> None:
        self._send({"note": text})

    def line(self, text: str) -> None:
        self._send({"line": text})

    def loading(self, loading: Loading) -> None:
        self._send({"loading": asdict(loading)})

    def ready(self, report: list[str]) -> None:
        """The waiting command ends on this, so the pipe is closed."""
        self._send({"ready": report}, within_s=LAST_WORD_S)
        self.close()

    def ended(self, exit_code: int, error: str | None) -> None:
        """The launch ended before it was ready."""
        self._send({"ended": exit_code, "error": error}, within_s=LAST_WORD_S)
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _send(self, event: dict[str, Any], within_s: float = 0.0) -> None:
        """Whole or not at all; once a line was cut short nothing more can follow."""
        if self._fd < 0:
            return
        data = memoryview(json.dumps(event).encode() + b"\n")
        deadline = time.monotonic() + within_s
        begun = False
        try:
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                    begun = True
                except BlockingIOError:
                    left_s = deadline - time.monotonic()
                    if not begun and left_s <= 0:
                        return  # nobody reads; progress may be lost
                    select.select([], [self._fd], [], max(0.1, left_s))
                    if begun and left_s < -LAST_WORD_S:
                        self.close()
                        return
        except OSError:
            self.close()


def replay(line: bytes, screen: Screen) -> tuple[int, str | None] | None:
    """Show one line of a Pipe on `screen`. The last one gives (exit code, error)."""
    event = json.loads(line)
    if "note" in event:
        screen.note(event["note"])
    elif "line" in event:
        screen.line(event["line"])
    elif "loading" in event:
        screen.loading(Loading(**event["loading"]))
    elif "ready" in event:
        screen.ready(event["ready"])
        return 0, None
    elif "ended" in event:
        return int(event["ended"]), event["error"]
    return None
