"""The processes of a run: started with spec, log file and descriptors, found by pidfd, ended and reaped. Decides nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evrun.launch.channels import supervision_pair
from evrun.launch.http.front import FrontEnd
from evrun.launch.logs import LogFolder, last_words, process_name
from evrun.launch.plan import Plan, Wiring
from evrun.launch.process import Exit, Process, child_environment
from evrun.launch.run_dir import RunDir
from evrun.launch.screen import Screen

COORDINATOR = ("-m", "evrun.coordinator")
WORKER = ("-m", "evrun.expert_worker")
FRONT_END = ("-m", "evrun.launch.http")
HTTP_THREADS = 1
TERM_GRACE_S = 1.0
"""From a polite request to end to SIGKILL."""
log = logging.getLogger("crew")


@dataclass(eq=False)
class Child:
    """A process of the run, with what the launcher has in mind for it."""

    process: Process
    role: str
    rank: int | None
    incarnation: int
    kill_at_s: float | None = None
    why: str = ""
    """Why we are ending it."""

    def __str__(self) -> str:
        return f"{process_name(self.role, self.rank)} (incarnation {self.incarnation}, pid {self.process.pid})"


class Crew:
    """Every process of the run that is not reaped yet.

    The children's modules are attributes, so that a test can put stand-ins in their place.
    front  the front end of a served run
    """

    coordinator_module: Sequence[str] = COORDINATOR
    worker_module: Sequence[str] = WORKER

    def __init__(
        self, plan: Plan, run_dir: RunDir, logs: LogFolder, wiring: Wiring, screen: Screen, front: FrontEnd | None = None
    ) -> None:
        self.front = front
        self._plan, self._run_dir, self._logs, self._wiring, self._screen = plan, run_dir, logs, wiring, screen
        self._children: dict[int, Child] = {}
        self._log_trouble = False

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._children.values()))

    def __bool__(self) -> bool:
        return bool(self._children)

    def pidfds(self) -> list[int]:
        return list(self._children)

    def find(self, role: str, rank: int | None = None) -> Child | None:
        return next((c for c in self._children.values() if c.role == role and c.rank == rank), None)

    def start_coordinator(self, incarnation: int) -> socket.socket:
        """Our end of its supervision socket. Raises OSError."""
        for socket_file in (self._wiring.hub_address.removeprefix("ipc://"), self._wiring.requests_path):
            self._run_dir.remove(os.path.basename(socket_file))  # of an incarnation that was killed
        ours, theirs = supervision_pair()
        with theirs:
            spec = self._plan.coordinator_spec(self._wiring, incarnation, theirs.fileno())
            if self.front is not None:
                spec = dataclasses.replace(spec, max_queue=self.front.config.max_queue)
            fds = [spec.supervision_fd, spec.call_fd, *spec.reply_fds, *spec.request_bell_fds, *spec.reply_bell_fds, spec.lifeline_fd]
            try:
                file = self._run_dir.write(f"coordinator.{incarnation}.json", spec.dump())
                self._start(self.coordinator_module, file, fds, "coordinator", None, incarnation, spec.threads)
            except OSError:
                ours.close()
                raise
        self._run_dir.remove(f"coordinator.{incarnation - 1}.json")
        return ours

    def start_worker(self, rank: int, incarnation: int) -> Child:
        """Raises OSError."""
        spec = self._plan.worker_spec(self._wiring, rank, incarnation)
        fds = [spec.call_fd, spec.reply_fd, spec.request_bell_fd, spec.reply_bell_fd, spec.lifeline_fd]
        file = self._run_dir.write(f"worker-{rank}.{incarnation}.json", spec.dump())
        child = self._start(self.worker_module, file, fds, "worker", rank, incarnation, spec.threads)
        self._run_dir.remove(f"worker-{rank}.{incarnation - 1}.json")
        return child

    def start_http(self, incarnation: int) -> None:
        """Raises OSError."""
        assert self.front is not None
        spec = self.front.spec(self._plan, self._wiring, incarnation)
        file = self._run_dir.write(f"http.{incarnation}.json", spec.dump())
        self._start(FRONT_END, file, [spec.listen_fd], "http", None, incarnation, HTTP_THREADS)
        self._run_dir.remove(f"http.{incarnation - 1}.json")

    def reap(self, pidfd: int) -> tuple[Child, Exit, str] | None:
        """(child, its exit, the exit in words) when that process has ended; it is forgotten here then."""
        child = self._children[pidfd]
        found = child.process.reap()
        if found is None:
            return None
        del self._children[pidfd]
        child.process.close()
        return child, found, self._in_words(child, found)

    def end_politely(self, child: Child, why: str) -> None:
        """SIGTERM now, SIGKILL after TERM_GRACE_S (by `kill_overdue`)."""
        child.why, child.kill_at_s = why, time.monotonic() + TERM_GRACE_S
        child.process.send(signal.SIGTERM)
        child.process.send(signal.SIGCONT)  # a stopped process takes no SIGTERM

    def next_kill_s(self) -> float | None:
        """Monotonic time at which `kill_overdue` has something to do."""
        return min((c.kill_at_s for c in self if c.kill_at_s is not None), default=None)

    def kill_overdue(self, now_s: float) -> None:
        for child in self:
            if child.kill_at_s is not None and now_s >= child.kill_at_s:
                child.kill_at_s = None
                log.warning("%s did not end within %.1f s: SIGKILL", child, TERM_GRACE_S)
                child.process.send(signal.SIGKILL)

    def _start(
        self, module: Sequence[str], file: str, fds: Sequence[int], role: str, rank: int | None, incarnation: int, threads: int
    ) -> Child:
        log_fd = self._log_fd(role, rank, incarnation)
        try:
            folder = str(self._run_dir.path)
            process = Process.start(module, file, fds, log_fd, folder, child_environment(os.environ, threads))
        finally:
            os.close(log_fd)
        child = Child(process, role, rank, incarnation)
        self._children[process.pidfd] = child
        with contextlib.suppress(OSError):  # no room for the line: then the child's own parent-death signal must do
            self._run_dir.note_process(process_name(role, rank), process.pid, process.started)
        log.info("started %s", child)
        return child

    def _log_fd(self, role: str, rank: int | None, attempt: int) -> int:
        try:
            return self._logs.create(role, rank, attempt)
        except OSError as error:
            if not self._log_trouble:
                self._log_trouble = True
                self._screen.note(f"log folder {self._logs.path}: {error.strerror}; the run goes on, log lines are lost")
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def _in_words(self, child: Child, found: Exit) -> str:
        """`killed by SIGKILL (no progress for 30.1 s)`, `exited with 4: no such device`."""
        if child.why:
            return f"{found} ({child.why})"
        words = last_words(self._logs.file(child.role, child.rank, child.incarnation)) if found.code else []
        return f"{found}: {words[0]}" if words else str(found)
