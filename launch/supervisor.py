"""The launcher's loop: starts coordinator and workers, and acts on deaths, commands, signals and what they report.

One thread, one wait. Everything that happens makes some descriptor readable: pidfds, the coordinator's socket, the
control socket, the wake pipe (signals, other threads). What to do about a death is `launch.policy`'s business.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from evrun.expert_worker.wire import errors, supervision
from evrun.expert_worker.wire.codec import CodecError
from evrun.expert_worker.wire.errors import EvrunError, UsageError
from evrun.expert_worker.wire.supervision import Fatal, KillWorker, RankStatus, Status
from evrun.launch import control, status
from evrun.launch.channels import Channels, supervision_pair
from evrun.launch.logs import LogFolder, last_words, process_name
from evrun.launch.plan import Plan, Wiring, falls_short
from evrun.launch.policy import Death
from evrun.launch.process import Exit, Process, child_environment, run_state
from evrun.launch.ranks import FAILED, HELD, LOST, RUNNING, Rank
from evrun.launch.run_dir import RunDir
from evrun.launch.screen import Loading, Screen
from evrun.launch.signals import Signals

COORDINATOR = ("-m", "evrun.coordinator")
WORKER = ("-m", "evrun.expert_worker")
TERM_GRACE_S = 1.0
"""From a polite end to SIGKILL, for one process and for all."""
REAP_WITHIN_S = 1.5
"""From SIGKILL to giving up on a process (uninterruptible I/O)."""
DRAW_EVERY_S = 0.25
LAST_ANSWER_S = 2.0
"""What the coordinator has for telling its client that no rank is left."""
log = logging.getLogger("supervisor")


@dataclass(frozen=True)
class Ending:
    """Why the run ended. `error` is for the user; None when the end was asked for."""

    exit_code: int
    error: str | None
    asked_by: str = ""
    """`signal SIGINT`, `evrun stop`, ..."""

    @property
    def by_signal(self) -> bool:
        return self.exit_code > 128


@dataclass(eq=False)
class Child:
    """A process of the run, with what the loop has in mind for it."""

    process: Process
    role: str
    rank: int | None
    incarnation: int
    kill_at_s: float | None = None
    why: str = ""
    """Why we are ending it."""

    @property
    def name(self) -> str:
        return process_name(self.role, self.rank)

    def __str__(self) -> str:
        return f"{self.name} (incarnation {self.incarnation}, pid {self.process.pid})"


class Supervisor:
    """One run, from the first process to the last.

    strict  a rank that cannot be started ends the run while it starts (a detached launch promises every rank)
    modules of the children are attributes, so that a test can put stand-ins in their place
    """

    coordinator_module: Sequence[str] = COORDINATOR
    worker_module: Sequence[str] = WORKER

    def __init__(
        self,
        plan: Plan,
        run_dir: RunDir,
        logs: LogFolder,
        channels: Channels,
        wiring: Wiring,
        signals: Signals,
        screen: Screen,
        strict: bool,
    ) -> None:
        self._plan, self._run_dir, self._logs, self._channels = plan, run_dir, logs, channels
        self._wiring, self._signals, self._screen, self._strict = wiring, signals, screen, strict
        self._control = control.ControlServer(run_dir.socket_path("control"), wiring.secret, self._command)
        self._poller = zmq.Poller()
        self._poller.register(self._control.socket, zmq.POLLIN)
        self._poller.register(signals.fd, zmq.POLLIN)
        self._ranks = [Rank(number) for number in range(plan.world)]
        self._children: dict[int, Child] = {}
        """By pidfd: every process that is not reaped yet."""
        self._coordinator: Child | None = None
        self._coordinator_incarnation = 0
        self._coordinator_reason = ""
        self._socket: socket.socket | None = None
        self._outbox: deque[tuple[Any, int]] = deque()
        """(message, pidfd to pass or -1) that the coordinator has not taken yet."""
        self._status: Status | None = None
        self._status_at_s = 0.0
        self._moved: tuple[Any, float] = (None, time.monotonic())
        """What the start had come to, and when that last changed."""
        self.ready = False
        """Whether every rank that can serve once did."""
        self._drawn_at_s = 0.0
        self._hopeless_since_s: float | None = None
        self._log_trouble = False
        self.ending: Ending | None = None
        self.ended = threading.Event()
        """Set, after `ending`, as soon as the run is to end; other threads read both."""
        self._stop_at_s = 0.0
        self._stop_stage = 0
        self._given_up: list[str] = []

    def run(self, on_ready: Callable[[], None]) -> Ending:
        """Start everything, serve until the run is to end, end everything. `on_ready` is called once, in this thread."""
        try:
            try:
                self._start_coordinator()
                while not (self.ending and self._all_gone()):
                    self._start_due_ranks()
                    self._turn()
                    if not self.ready and self.ending is None:
                        self._watch_start(on_ready)
            except EvrunError as error:
                self.end(Ending(error.exit_code, str(error)))
            except OSError as error:
                log.exception("the launcher failed")
                self.end(Ending(errors.RUNNING, f"the launcher failed: {error}; see `evrun logs launcher`"))
            while not self._all_gone():
                self._turn()
        finally:
            self._kill_everything()
            self._control.close()
            if self._socket is not None:
                self._socket.close()
        assert self.ending is not None
        return self.ending

    def end(self, ending: Ending) -> None:
        """Begin the end. The first reason counts. Any thread may call it, and then wake the loop through the signals' pipe."""
        if self.ending is None:
            self.ending = ending
            self.ended.set()
            log.info("end of the run: %s", ending.error or ending.asked_by)

    # One turn of the loop

    def _turn(self) -> None:
        self._begin_stop()
        self._send_outbox()
        ready = dict(self._poller.poll(self._wait_ms()))
        now_s = time.monotonic()
        for number in self._signals.take():
            self.end(Ending(128 + number, None, f"signal {signal.Signals(number).name}"))
        if self._socket is not None and self._socket.fileno() in ready:
            self._listen()
        for fd in [fd for fd in ready if fd in self._children]:
            self._bury(self._children[fd], now_s)
        if self._control.socket in ready:
            self._control.serve()
        for child in list(self._children.values()):
            if child.kill_at_s is not None and now_s >= child.kill_at_s:
                child.kill_at_s = None
                log.warning("%s did not end within %.1f s: SIGKILL", child, TERM_GRACE_S)
                child.process.send(signal.SIGKILL)
        self._judge(now_s)

    def _wait_ms(self) -> int:
        now_s = time.monotonic()
        times = [now_s + (DRAW_EVERY_S if not self.ready else 1.0)]
        times += [rank.restart_at_s for rank in self._ranks if rank.state == "restarting" and self.ending is None]
        times += [child.kill_at_s for child in self._children.values() if child.kill_at_s is not None]
        if self._outbox or self.ending is not None:
            times.append(now_s + 0.02)
        return max(0, int((min(times) - now_s) * 1000) + 1)

    # Starting

    def _start_coordinator(self) -> None:
        self._coordinator_incarnation += 1
        incarnation = self._coordinator_incarnation
        ours, theirs = supervision_pair()
        with theirs:
            spec = self._plan.coordinator_spec(self._wiring, incarnation, theirs.fileno())
            fds = [spec.supervision_fd, spec.call_fd, *spec.reply_fds, *spec.request_bell_fds, *spec.reply_bell_fds, spec.lifeline_fd]
            file = self._run_dir.write(f"coordinator.{incarnation}.json", spec.dump())
            threads = self._plan.coordinator.threads
            self._coordinator = self._start(self.coordinator_module, file, fds, "coordinator", None, incarnation, threads)
        self._socket = ours
        self._poller.register(ours.fileno(), zmq.POLLIN)

    def _start_due_ranks(self) -> None:
        if self.ending is not None:
            return
        now_s = time.monotonic()
        for rank in self._ranks:
            if rank.is_due(now_s):
                self._start_worker(rank)

    def _start_worker(self, rank: Rank) -> None:
        incarnation = rank.start()
        seat = self._plan.ranks[rank.number]
        spec = self._plan.worker_spec(self._wiring, rank.number, incarnation)
        fds = [spec.call_fd, spec.reply_fd, spec.request_bell_fd, spec.reply_bell_fd, spec.lifeline_fd]
        try:
            file = self._run_dir.write(f"worker-{rank.number}.{incarnation}.json", spec.dump())
            child = self._start(self.worker_module, file, fds, "worker", rank.number, incarnation, seat.threads)
        except OSError as error:  # no memory, no process or descriptor left: as good as a death
            log.error("rank %d could not be started: %s", rank.number, error)
            returns = rank.die(Death(time.monotonic(), 0, None, f"could not be started: {error}"))
            self._tell(supervision.WorkerGone(rank.number, incarnation, rank.reason, returns))
            return
        self._run_dir.remove(f"worker-{rank.number}.{incarnation - 1}.json")
        self._tell(supervision.WorkerStarted(rank.number, incarnation, child.process.pid), os.dup(child.process.pidfd))

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
        self._poller.register(process.pidfd, zmq.POLLIN)
        with contextlib.suppress(OSError):  # no room for the line: then the child's own parent-death signal must do
            self._run_dir.note_process(child.name, process.pid, process.started)
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

    def _watch_start(self, on_ready: Callable[[], None]) -> None:
        """Progress, the start's deadline, and the moment when everything serves."""
        now_s = time.monotonic()
        told = status.rank_statuses(self._status)
        if self._is_ready(told):
            self.ready = True
            self._screen.ready(list(self._status.report) if self._status else [])
            log.info("ready: %s", "; ".join(self._status.report) if self._status else "")
            on_ready()
            return
        waited = [
            f"rank {r.number}" for r in self._ranks if r.state in (RUNNING, "restarting") and not status.serves(r, told.get(r.number))
        ]
        phase = self._status.phase if self._status is not None else "starting the coordinator"
        done, total = (self._status.done_bytes, self._status.total_bytes) if self._status is not None else (0, 0)
        moved = (phase, done, [status.rank_state(r, told.get(r.number)) for r in self._ranks])
        if moved != self._moved[0]:
            self._moved = (moved, now_s)
        quiet_s = now_s - self._moved[1]
        if self._status is None and quiet_s > self._plan.config.start_timeout:
            error = f"coordinator: expected a sign of life, found none for {quiet_s:.0f} s (--start-timeout); see `evrun logs coordinator`"
            self.end(Ending(errors.RUNNING, error))
        if now_s - self._drawn_at_s >= DRAW_EVERY_S:
            self._drawn_at_s = now_s
            self._screen.loading(Loading(phase, done, total, waited))

    def _is_ready(self, told: dict[int, RankStatus]) -> bool:
        """Whether the coordinator takes requests and every rank serves; ranks that gave up count unless the launch is strict."""
        if self._status is None or self._status.state not in status.SERVES:
            return False
        settled = [status.serves(r, told.get(r.number)) or r.state in (FAILED, LOST, HELD) for r in self._ranks]
        return all(settled) and any(status.serves(r, told.get(r.number)) for r in self._ranks)

    # What the coordinator says and hears

    def _listen(self) -> None:
        assert self._socket is not None
        while True:
            try:
                packet = supervision.receive(self._socket)
            except CodecError as error:
                log.warning("coordinator: %s", error)
                continue
            except (EOFError, OSError):
                self._hang_up()  # its pidfd tells the rest
                return
            if packet is None:
                return
            message, fds = packet
            for fd in fds:
                os.close(fd)
            if isinstance(message, Status):
                self._status, self._status_at_s = message, time.monotonic()
                self._check_rungs()
            elif isinstance(message, KillWorker):
                self._kill_worker(message)
            elif isinstance(message, Fatal):
                self.end(Ending(message.exit_code, message.error))

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._poller.unregister(self._socket.fileno())
            self._socket.close()
            self._socket = None
        for _, fd in self._outbox:
            if fd >= 0:
                os.close(fd)
        self._outbox.clear()

    def _tell(self, message: Any, fd: int = -1) -> None:
        """Nothing of this may get lost: what does not fit into the socket now goes later, in order. Takes over `fd`."""
        self._outbox.append((message, fd))
        self._send_outbox()

    def _send_outbox(self) -> None:
        while self._outbox and self._socket is not None:
            message, fd = self._outbox[0]
            try:
                if not supervision.send(self._socket, message, (fd,) if fd >= 0 else ()):
                    return
            except OSError:
                self._hang_up()
                return
            self._outbox.popleft()
            if fd >= 0:
                os.close(fd)
        if self._socket is None:
            self._hang_up()

    def _kill_worker(self, message: KillWorker) -> None:
        child = self._worker(message.rank)
        if child is not None and child.incarnation == message.incarnation:
            log.warning("%s: the coordinator asked for its end: %s", child, message.reason)
            child.why = message.reason
            child.process.send(signal.SIGKILL)

    def _check_rungs(self) -> None:
        required = self._plan.config.require
        for told in status.rank_statuses(self._status).values() if required is not None else ():
            if told.rung and required is not None and falls_short(told.rung, required):
                found = f"rank {told.rank} on {told.device} takes its rows from rung {told.rung}"
                error = f"--require {required}: {found}; see `evrun logs {told.rank}`"
                self.end(Ending(errors.DEVICE, error))

    # Deaths

    def _bury(self, child: Child, now_s: float) -> None:
        found = child.process.reap()
        if found is None:
            return
        self._poller.unregister(child.process.pidfd)
        del self._children[child.process.pidfd]
        child.process.close()
        reason = self._reason(child, found)
        log.log(logging.INFO if self.ending else logging.WARNING, "%s %s", child, reason)
        if child is self._coordinator:
            self._coordinator = None
            self._coordinator_died(found, reason)
            return
        assert child.rank is not None
        rank = self._ranks[child.rank]
        returns = rank.die(Death(now_s, self._calls(rank), found.code, reason))
        if rank.state in (FAILED, LOST) and self.ending is None:
            log.error("rank %d is %s: %s", rank.number, rank.state, rank.reason)
            self._screen.note(f"rank {rank.number} is {rank.state}: {rank.reason}")
        self._tell(supervision.WorkerGone(rank.number, child.incarnation, rank.reason, returns))

    def _reason(self, child: Child, found: Exit) -> str:
        """`killed by SIGKILL (no progress for 30.1 s)`, `exited with 4: no such device`."""
        if child.why:
            return f"{found} ({child.why})"
        words = last_words(self._logs.file(child.role, child.rank, child.incarnation)) if found.code else []
        return f"{found}: {words[0]}" if words else str(found)

    def _calls(self, rank: Rank) -> int:
        """Layer calls that the rank's newest incarnation served, by its own record and by the coordinator's word."""
        beat = self._channels.beat(rank.number)
        told = status.rank_statuses(self._status).get(rank.number)
        by_beat = beat.calls if beat is not None and beat.incarnation == rank.incarnation else 0
        by_word = told.calls if told is not None and told.incarnation == rank.incarnation else 0
        return max(by_beat, by_word)

    def _coordinator_died(self, found: Exit, reason: str) -> None:
        """Without its coordinator a launch is over (its own word, Fatal, has already been heard if there was one)."""
        self._hang_up()
        self._coordinator_reason = reason
        passed_on = found.code if found.code in (errors.USAGE, errors.CHECKPOINT, errors.DEVICE) and not self.ready else None
        self.end(Ending(passed_on or errors.RUNNING, f"coordinator {reason}; see `evrun logs coordinator`"))

    def _judge(self, now_s: float) -> None:
        """End the run when a strict start cannot succeed, or when no rank is left and none will return."""
        if self.ending is not None:
            return
        gone = [rank for rank in self._ranks if rank.state in (FAILED, LOST)]
        if gone and self._strict and not self.ready:
            self.end(self._loss(gone[0]))
        if len(gone) < len(self._ranks):
            self._hopeless_since_s = None
            return
        # The coordinator gets a moment to tell its client; its own end or Fatal may come first.
        self._hopeless_since_s = self._hopeless_since_s or now_s
        running = self._status is not None and self._status.requests_running + self._status.requests_waiting > 0
        if not running or now_s - self._hopeless_since_s > LAST_ANSWER_S:
            self.end(self._loss(next((rank for rank in gone if rank.state == LOST), gone[0])))

    def _loss(self, rank: Rank) -> Ending:
        code = errors.DEVICE if rank.state == LOST else errors.CHECKPOINT if self._refused_checkpoint(rank) else errors.RUNNING
        return Ending(code, f"rank {rank.number} is {rank.state}: {rank.reason}; see `evrun logs {rank.number}`")

    def _refused_checkpoint(self, rank: Rank) -> bool:
        return bool(rank.deaths) and rank.deaths[-1].exit_code == errors.CHECKPOINT

    # The end

    def _begin_stop(self) -> None:
        """Stage by stage: ask, SIGKILL, give up on what cannot be killed."""
        if self.ending is None:
            return
        now_s = time.monotonic()
        if self._stop_stage == 0:
            self._stop_stage, self._stop_at_s = 1, now_s + TERM_GRACE_S
            self._tell(supervision.Shutdown(self.ending.error or self.ending.asked_by))
            for child in self._children.values():
                if child is not self._coordinator:
                    child.process.send(signal.SIGTERM)
        elif self._stop_stage == 1 and now_s >= self._stop_at_s:
            self._stop_stage, self._stop_at_s = 2, now_s + REAP_WITHIN_S
            for child in self._children.values():
                log.warning("%s did not end within %.1f s: SIGKILL", child, TERM_GRACE_S)
                child.process.send(signal.SIGKILL)
        elif self._stop_stage == 2 and now_s >= self._stop_at_s:
            self._stop_stage = 3
            for child in self._children.values():
                text = f"{child} could not be killed (state {run_state(child.process.pid)}): it waits for I/O that cannot be interrupted"
                log.error(text)
                self._screen.note(text)

    def _all_gone(self) -> bool:
        return not self._children or self._stop_stage == 3

    def _kill_everything(self) -> None:
        """Whatever happened, no child stays behind an ended loop."""
        for child in self._children.values():
            child.process.send(signal.SIGKILL)

    # Commands

    def _command(self, command: Any) -> Any:
        if isinstance(command, control.Ps):
            return control.Processes(json.dumps(self.view()))
        if isinstance(command, control.Stop):
            early = f"stopped before it was ready: {command.reason}"
            self.end(Ending(0, None, command.reason) if self.ready else Ending(errors.RUNNING, early))
            return control.Done("stopping")
        if self.ending is not None:
            raise UsageError("the run is ending")
        if not 0 <= command.rank < len(self._ranks):
            raise UsageError(f"rank: expected 0 to {len(self._ranks) - 1}, found {command.rank}")
        return self._kill(command) if isinstance(command, control.Kill) else self._restart(command)

    def _kill(self, command: control.Kill) -> control.Done:
        rank, child = self._ranks[command.rank], self._worker(command.rank)
        if command.hold:
            rank.keep_down()
        if child is None:
            if command.hold and rank.state == HELD:
                self._tell(supervision.WorkerGone(rank.number, rank.incarnation, rank.reason, False))
                return control.Done(f"rank {rank.number} has no process; it stays down")
            raise UsageError(f"rank {rank.number} has no process now (state {rank.state}: {rank.reason}); see `evrun ps`")
        name = signal.Signals(command.signal).name
        log.info("%s: %s, asked for by a command%s", child, name, ", then held down" if command.hold else "")
        child.process.send(command.signal)
        return control.Done(f"{name} sent to rank {rank.number}, incarnation {child.incarnation}, pid {child.process.pid}")

    def _restart(self, command: control.Restart) -> control.Done:
        rank, child = self._ranks[command.rank], self._worker(command.rank)
        rank.revive(time.monotonic())
        self._hopeless_since_s = None
        if child is not None:
            child.why, child.kill_at_s = "restart asked for", time.monotonic() + TERM_GRACE_S
            child.process.send(signal.SIGTERM)
            child.process.send(signal.SIGCONT)  # a stopped process takes no SIGTERM
        log.info("rank %d: restart asked for by a command", rank.number)
        return control.Done(f"rank {rank.number} restarts as incarnation {rank.incarnation + 1}")

    def _worker(self, rank: int) -> Child | None:
        return next((c for c in self._children.values() if c.rank == rank), None)

    def view(self) -> dict[str, Any]:
        """The object of `ps --json`."""
        stopping = self.ending is not None
        told = status.rank_statuses(self._status)
        age_s = time.monotonic() - self._status_at_s if self._status is not None else None
        pid = self._coordinator.process.pid if self._coordinator is not None else None
        device = self._plan.coordinator.device
        seen = status.CoordinatorView(pid, device, self._coordinator_incarnation, self._coordinator_reason, age_s)
        rows = [status.coordinator_row(seen, self._status, stopping)]
        for rank in self._ranks:
            child = self._worker(rank.number)
            beat = self._channels.beat(rank.number)
            rank_pid = child.process.pid if child is not None else None
            device = self._plan.ranks[rank.number].device
            rows.append(status.rank_row(rank, rank_pid, device, told.get(rank.number), beat, stopping))
        return {
            "name": self._plan.config.name,
            "run": self._wiring.run_id,
            "launcher_pid": os.getpid(),
            "state": status.run_state(self._status, stopping),
            "processes": rows,
        }
