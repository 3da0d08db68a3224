"""The launcher's loop: starts coordinator and workers, and acts on deaths, commands, signals and what they report.

One thread, one wait. Everything that happens makes some descriptor readable: pidfds, the coordinator's socket, the
control socket, the signals' pipe (which other threads ring too). What to do about a death is `launch.policy`'s business.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from evrun.expert_worker.wire import errors, supervision
from evrun.expert_worker.wire.errors import EvrunError, UsageError
from evrun.expert_worker.wire.supervision import Fatal, KillWorker, RankStatus, Status
from evrun.launch import control, status
from evrun.launch.channels import Channels
from evrun.launch.coordinator_link import CoordinatorLink
from evrun.launch.crew import TERM_GRACE_S, Child, Crew
from evrun.launch.plan import Plan, Wiring, falls_short
from evrun.launch.policy import Death, GiveUp
from evrun.launch.process import Exit, run_state
from evrun.launch.ranks import FAILED, HELD, LOST, RUNNING, WAITING, Rank
from evrun.launch.screen import Loading, Screen
from evrun.launch.signals import Signals
from evrun.launch.standing import Standing

REAP_WITHIN_S = 1.5
"""From SIGKILL to giving up on a process (uninterruptible I/O)."""
DRAW_EVERY_S = 0.25
IDLE_S = 1.0
DRAIN_MARGIN_S = 1.0
"""Beyond its own bound, for the front end to end."""
HTTP_PROVEN_S = 5.0
"""A front end that lived for so long works; its death does not count against the restart cap."""
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


class Supervisor:
    """One run, from the first process to the last.

    strict  a rank that cannot be started ends the run while it starts (a detached launch promises every rank)
    """

    def __init__(
        self, plan: Plan, crew: Crew, channels: Channels, wiring: Wiring, control_path: str, signals: Signals, screen: Screen, strict: bool
    ) -> None:
        self._plan, self._crew, self._channels, self._wiring = plan, crew, channels, wiring
        self._signals, self._screen, self._strict = signals, screen, strict
        self._control = control.ControlServer(control_path, wiring.secret, self._command)
        self._ranks = [Rank(number) for number in range(plan.world)]
        self._link: CoordinatorLink | None = None
        self._coordinator = Standing("coordinator")
        self._http = Standing("http") if crew.front is not None else None
        self._http_started_at_s = 0.0
        self._drain_until_s: float | None = None
        self._status: Status | None = None
        self._told: dict[int, RankStatus] = {}
        self._status_at_s = 0.0
        self._started_at_s = time.monotonic()
        self._drawn_at_s = 0.0
        self._hopeless_since_s: float | None = None
        self._stop_stage = 0
        self._stop_at_s = 0.0
        self.ready = False
        """Whether every rank that can serve once did."""
        self.report: list[str] = []
        """The build report, as it was shown then."""
        self.ending: Ending | None = None
        self.ended = threading.Event()
        """Set, after `ending`, as soon as the run is to end; other threads read both."""

    def run(self, on_ready: Callable[[], None]) -> Ending:
        """Start everything, serve until the run is to end, end everything. `on_ready` is called once, in this thread."""
        try:
            try:
                self._start_coordinator()
                self._start_http()
                while self.ending is None:
                    self._start_due(time.monotonic())
                    self._turn()
                    self._judge(time.monotonic())
                    if not self.ready and self.ending is None:
                        self._watch_start(on_ready)
            except EvrunError as error:
                self.end(Ending(error.exit_code, str(error)))
            except OSError as error:
                log.exception("the launcher failed")
                self.end(Ending(errors.RUNNING, f"the launcher failed: {error}; see `evrun logs launcher`"))
            while self._crew and self._stop_stage < 3:
                self._stop_further(time.monotonic())
                self._turn()
        finally:
            for child in self._crew:  # whatever happened, no process stays behind an ended loop
                child.process.send(signal.SIGKILL)
            self._control.close()
            if self._link is not None:
                self._link.close()
        assert self.ending is not None
        return self.ending

    def end(self, ending: Ending) -> None:
        """Begin the end; the first reason counts. Any thread may call it, and then ring the signals' pipe."""
        if self.ending is None:
            self.ending = ending
            self.ended.set()
            log.info("end of the run: %s", ending.error or ending.asked_by)

    # ---- one turn ----

    def _turn(self) -> None:
        if self._link is not None:
            self._link.flush()
        ready = self._wait()
        now_s = time.monotonic()
        for number in self._signals.take():
            self.end(Ending(128 + number, None, f"signal {signal.Signals(number).name}"))
        if self._link is not None and self._link.fd in ready:
            for message in self._link.receive():
                self._hear(message)
        for pidfd in self._crew.pidfds():
            if pidfd in ready:
                self._bury(pidfd, now_s)
        if self._control.socket in ready:
            self._control.serve()
        self._crew.kill_overdue(now_s)

    def _wait(self) -> dict[Any, int]:
        """What is readable; waits until something is, or until something is due."""
        now_s = time.monotonic()
        due = [now_s + (IDLE_S if self.ready else DRAW_EVERY_S)]
        if self.ending is None:
            due += [rank.restart_at_s for rank in self._ranks if rank.state == WAITING and self._coordinator.due_at_s is None]
            due += [s.due_at_s for s in (self._coordinator, self._http) if s is not None and s.due_at_s is not None]
        due += [at_s for at_s in [self._crew.next_kill_s()] if at_s is not None]
        if self.ending is not None or (self._link is not None and self._link.has_unsent):
            due.append(now_s + 0.02)
        poller = zmq.Poller()
        poller.register(self._control.socket, zmq.POLLIN)
        for fd in [self._signals.fd, *self._crew.pidfds(), *([self._link.fd] if self._link is not None and self._link.fd >= 0 else [])]:
            poller.register(fd, zmq.POLLIN)
        return dict(poller.poll(max(0, int((min(due) - now_s) * 1000) + 1)))

    # ---- starting ----

    def _start_coordinator(self) -> None:
        self._started_at_s = time.monotonic()
        self._link = CoordinatorLink(self._crew.start_coordinator(self._coordinator.start()))
        for rank in self._ranks:
            if rank.state in (FAILED, LOST, HELD):  # one that replaces another has not heard of it
                self._tell(supervision.WorkerGone(rank.number, rank.incarnation, rank.reason, False))

    def _start_http(self) -> None:
        if self._http is not None:
            self._http_started_at_s = time.monotonic()
            self._crew.start_http(self._http.start())

    def _start_due(self, now_s: float) -> None:
        """Processes whose time has come: the coordinator before the workers, which it must be told of."""
        if self._coordinator.is_due(now_s):
            self._start_coordinator()
        if self._http is not None and self._http.is_due(now_s):
            self._start_http()
        for rank in self._ranks:
            if rank.is_due(now_s) and self._coordinator.due_at_s is None:
                self._start_worker(rank)

    def _start_worker(self, rank: Rank) -> None:
        incarnation = rank.start()
        try:
            child = self._crew.start_worker(rank.number, incarnation)
        except OSError as error:  # no memory, no process or descriptor left: as good as a death
            log.error("rank %d could not be started: %s", rank.number, error)
            self._after_death(rank, Death(time.monotonic(), 0, None, f"could not be started: {error}"))
            return
        try:
            pidfd = os.dup(child.process.pidfd)
        except OSError as error:  # without it the coordinator would not see the death: better no such process
            child.why = f"no descriptor for the coordinator: {error}"
            child.process.send(signal.SIGKILL)
            return
        self._tell(supervision.WorkerStarted(rank.number, incarnation, child.process.pid), pidfd)

    def _watch_start(self, on_ready: Callable[[], None]) -> None:
        """Progress, the moment when everything serves, and a coordinator that never says a word."""
        now_s = time.monotonic()
        if self._is_ready():
            self.ready = True
            self.report = list(self._status.report) if self._status is not None else []
            self._screen.ready(self.report)
            log.info("ready: %s", "; ".join(self.report))
            on_ready()
            return
        limit_s = self._plan.config.start_timeout
        if self._is_silent(now_s):
            found = f"expected a sign of life within {limit_s:g} s (--start-timeout), found none"
            self.end(Ending(errors.RUNNING, f"coordinator: {found}; see `evrun logs coordinator`"))
        if now_s - self._drawn_at_s >= DRAW_EVERY_S:
            self._drawn_at_s = now_s
            self._screen.loading(self._loading())

    def _is_silent(self, now_s: float) -> bool:
        """Whether the coordinator's process has not said a word since it was started, for too long."""
        return self._status is None and self._coordinator.due_at_s is None and now_s - self._started_at_s > self._plan.config.start_timeout

    def _is_ready(self) -> bool:
        """Whether the coordinator takes requests, every rank serves or is down for good, and at least one serves."""
        if self._status is None or self._status.state not in status.SERVES:
            return False
        serving = [self._serves(rank) for rank in self._ranks]
        return any(serving) and all(s or rank.state in (FAILED, LOST, HELD) for s, rank in zip(serving, self._ranks, strict=True))

    def _serves(self, rank: Rank) -> bool:
        return status.serves(rank, self._told.get(rank.number))

    def _loading(self) -> Loading:
        waiting = [f"rank {r.number}" for r in self._ranks if r.state in (RUNNING, WAITING) and not self._serves(r)]
        if self._status is None:
            return Loading("starting the coordinator", 0, 0, waiting)
        return Loading(self._status.phase, self._status.done_bytes, self._status.total_bytes, waiting)

    # ---- the coordinator's word ----

    def _tell(self, message: Any, fd: int = -1) -> None:
        if self._link is not None:
            self._link.tell(message, fd)
        elif fd >= 0:
            os.close(fd)

    def _hear(self, message: Any) -> None:
        if isinstance(message, Status):
            self._status, self._told = message, status.rank_statuses(message)
            self._status_at_s = time.monotonic()
            self._coordinator.served = self._coordinator.served or message.state in status.SERVES
            self._check_rungs()
        elif isinstance(message, KillWorker):
            child = self._crew.find("worker", message.rank)
            if child is not None and child.incarnation == message.incarnation:
                log.warning("%s: the coordinator asked for its end: %s", child, message.reason)
                child.why = message.reason
                child.process.send(signal.SIGKILL)
        elif isinstance(message, Fatal) and not self._replaces_coordinator:
            self.end(Ending(message.exit_code, message.error))

    def _check_rungs(self) -> None:
        required = self._plan.config.require
        for told in self._told.values():
            if required is not None and told.rung and falls_short(told.rung, required):
                found = f"rank {told.rank} on {told.device} takes its rows from rung {told.rung}"
                self.end(Ending(errors.DEVICE, f"--require {required}: {found}; see `evrun logs {told.rank}`"))

    # ---- deaths ----

    def _bury(self, pidfd: int, now_s: float) -> None:
        ended = self._crew.reap(pidfd)
        if ended is None:
            return
        child, found, words = ended
        log.log(logging.INFO if self.ending else logging.WARNING, "%s %s", child, words)
        if child.role == "coordinator":
            self._coordinator_died(found, words, now_s)
        elif child.rank is None:
            self._http_died(found, words, now_s)
        else:
            rank = self._ranks[child.rank]
            self._after_death(rank, Death(now_s, self._calls(rank), found.code, words))

    def _after_death(self, rank: Rank, death: Death) -> None:
        returns = rank.die(death)
        if rank.state in (FAILED, LOST) and self.ending is None:
            log.error("rank %d is %s: %s", rank.number, rank.state, rank.reason)
            self._screen.note(f"rank {rank.number} is {rank.state}: {rank.reason}")
        self._tell(supervision.WorkerGone(rank.number, rank.incarnation, rank.reason, returns))

    def _calls(self, rank: Rank) -> int:
        """Layer calls that the rank's newest incarnation served, by its own record and by the coordinator's word."""
        beat, told = self._channels.beat(rank.number), self._told.get(rank.number)
        by_beat = beat.calls if beat is not None and beat.incarnation == rank.incarnation else 0
        by_word = told.calls if told is not None and told.incarnation == rank.incarnation else 0
        return max(by_beat, by_word)

    @property
    def _replaces_coordinator(self) -> bool:
        """A served run goes on without its coordinator, once it was ready: there are clients that will ask again."""
        return self._http is not None and self.ready

    def _coordinator_died(self, found: Exit, words: str, now_s: float) -> None:
        """Without its coordinator a launch is over; its own word (Fatal) has been heard by now if there was one."""
        given_up = self._coordinator.die(now_s, found.code, words)
        if self._replaces_coordinator and given_up is None and self.ending is None:
            self._screen.note(f"coordinator {words}; it is replaced, and the workers with it")
            self._status, self._told = None, {}
            if self._link is not None:
                self._link.close()
            for child in self._crew:
                if child.rank is not None:
                    # Workers keep nothing, and a call of the dead coordinator may still lie in their cells.
                    self._ranks[child.rank].replace = not self._ranks[child.rank].hold
                    child.why = "its coordinator is gone"
                    child.process.send(signal.SIGKILL)
            return
        self._coordinator.due_at_s = None
        if isinstance(given_up, GiveUp) and self._replaces_coordinator:
            words = f"is {given_up.state}: {given_up.reason}"
        passed_on = found.code if found.code in (errors.USAGE, errors.CHECKPOINT, errors.DEVICE) and not self.ready else None
        self.end(Ending(passed_on or errors.RUNNING, f"coordinator {words}; see `evrun logs coordinator`"))

    def _http_died(self, found: Exit, words: str, now_s: float) -> None:
        if self._http is None or self.ending is not None:
            return
        self._http.served = now_s - self._http_started_at_s > HTTP_PROVEN_S
        given_up = self._http.die(now_s, found.code, words)
        if given_up is not None:
            self.end(Ending(errors.RUNNING, f"http is {given_up.state}: {given_up.reason}; see `evrun logs http`"))

    def _judge(self, now_s: float) -> None:
        """Kill a new coordinator that never speaks; end the run when a strict start cannot succeed, or no rank is left or will return."""
        child = self._crew.find("coordinator")
        if self.ready and child is not None and self._is_silent(now_s):
            child.why = f"no sign of life within {self._plan.config.start_timeout:g} s"
            child.process.send(signal.SIGKILL)
        gone = [rank for rank in self._ranks if rank.state in (FAILED, LOST)]
        if gone and self._strict and not self.ready:
            self.end(_loss(gone[0]))
        if len(gone) < len(self._ranks):
            self._hopeless_since_s = None
            return
        # The coordinator gets a moment to tell its client; its own end or Fatal may come first.
        self._hopeless_since_s = self._hopeless_since_s or now_s
        asked = self._status is not None and self._status.requests_running + self._status.requests_waiting > 0
        if not asked or now_s - self._hopeless_since_s > LAST_ANSWER_S:
            self.end(_loss(next((rank for rank in gone if rank.state == LOST), gone[0])))

    # ---- the end ----

    def _stop_further(self, now_s: float) -> None:
        """Stage by stage: let the front end finish, ask, SIGKILL, give up on what cannot be killed."""
        assert self.ending is not None
        if self._stop_stage == 0 and self._drains(now_s):
            return
        if self._stop_stage == 0:
            self._stop_stage, self._stop_at_s = 1, now_s + TERM_GRACE_S
            self._tell(supervision.Shutdown(self.ending.error or self.ending.asked_by))
            for child in self._crew:
                if child.role != "coordinator":
                    child.process.send(signal.SIGTERM)
        elif self._stop_stage == 1 and now_s >= self._stop_at_s:
            self._stop_stage, self._stop_at_s = 2, now_s + REAP_WITHIN_S
            for child in self._crew:
                log.warning("%s did not end within %.1f s: SIGKILL", child, TERM_GRACE_S)
                child.process.send(signal.SIGKILL)
        elif self._stop_stage == 2 and now_s >= self._stop_at_s:
            self._stop_stage = 3
            for child in self._crew:
                state = run_state(child.process.pid)
                text = f"{child} could not be killed (state {state}): it waits for I/O that cannot be interrupted"
                log.error(text)
                self._screen.note(text)

    def _drains(self, now_s: float) -> bool:
        """Whether the front end still ends its requests, which it is asked to once; the rest goes on meanwhile."""
        child = self._crew.find("http")
        if child is None or self._crew.front is None or self._crew.find("coordinator") is None:
            return False
        if self._drain_until_s is None:
            self._drain_until_s = now_s + self._crew.front.drain_s + DRAIN_MARGIN_S
            child.process.send(signal.SIGTERM)
        return now_s < self._drain_until_s

    # ---- commands ----

    def _command(self, command: Any) -> Any:
        if isinstance(command, control.Ps):
            return control.Processes(json.dumps(self.view()))
        if isinstance(command, control.Look):
            return control.Processes(json.dumps(self.look()))
        if isinstance(command, control.Stop):
            early = f"stopped before it was ready: {command.reason}"
            self.end(Ending(0, None, command.reason) if self.ready else Ending(errors.RUNNING, early))
            return control.Done("stopping")
        if self.ending is not None:
            raise UsageError("the run is ending")
        if not 0 <= command.rank < len(self._ranks):
            raise UsageError(f"rank: expected 0 to {len(self._ranks) - 1}, found {command.rank}")
        rank, child = self._ranks[command.rank], self._crew.find("worker", command.rank)
        return self._kill(rank, child, command) if isinstance(command, control.Kill) else self._restart(rank, child)

    def _kill(self, rank: Rank, child: Child | None, command: control.Kill) -> control.Done:
        if command.hold:
            rank.keep_down()
        if child is None:
            if rank.state != HELD or not command.hold:
                raise UsageError(f"rank {rank.number} has no process now (state {rank.state}: {rank.reason}); see `evrun ps`")
            self._tell(supervision.WorkerGone(rank.number, rank.incarnation, rank.reason, False))
            return control.Done(f"rank {rank.number} has no process; it stays down")
        name = signal.Signals(command.signal).name
        log.info("%s: %s, asked for by a command%s", child, name, "; then held down" if command.hold else "")
        child.process.send(command.signal)
        return control.Done(f"{name} sent to rank {rank.number}, incarnation {child.incarnation}, pid {child.process.pid}")

    def _restart(self, rank: Rank, child: Child | None) -> control.Done:
        log.info("rank %d: restart asked for by a command", rank.number)
        rank.revive(time.monotonic())
        if child is not None:
            self._crew.end_politely(child, "restart asked for")
        return control.Done(f"rank {rank.number} restarts as incarnation {rank.incarnation + 1}")

    def view(self) -> dict[str, Any]:
        """The object of `ps --json`."""
        stopping = self.ending is not None
        age_s = time.monotonic() - self._status_at_s if self._status is not None else None
        seat = self._plan.coordinator
        seen = status.CoordinatorView(
            _pid(self._crew.find("coordinator")), seat.device, self._coordinator.incarnation, self._coordinator.reason, age_s
        )
        rows = [status.coordinator_row(seen, self._status, stopping)]
        for rank, seat in zip(self._ranks, self._plan.ranks, strict=True):
            pid, beat = _pid(self._crew.find("worker", rank.number)), self._channels.beat(rank.number)
            rows.append(status.rank_row(rank, pid, seat.device, self._told.get(rank.number), beat, stopping))
        if self._http is not None and self._crew.front is not None:
            rows.append(status.http_row(self._http, _pid(self._crew.find("http")), self._crew.front.url, stopping))
        return {
            "name": self._plan.config.name,
            "run": self._wiring.run_id,
            "launcher_pid": os.getpid(),
            "state": status.run_state(self._status, stopping),
            "processes": rows,
        }

    def look(self) -> dict[str, Any]:
        """The object of control.Look."""
        told = self._status
        beats = [self._channels.beat(rank.number) for rank in self._ranks]
        return {
            "ps": self.view(),
            "phase": told.phase if told is not None else "starting the coordinator",
            "done_bytes": told.done_bytes if told is not None else 0,
            "total_bytes": told.total_bytes if told is not None else 0,
            "requests_running": told.requests_running if told is not None else 0,
            "requests_waiting": told.requests_waiting if told is not None else 0,
            "calls": [[beat.incarnation, beat.calls] if beat is not None else [0, 0] for beat in beats],
        }


def _pid(child: Child | None) -> int | None:
    return None if child is None else child.process.pid


def _loss(rank: Rank) -> Ending:
    """The end of a run for want of this rank."""
    refused = bool(rank.deaths) and rank.deaths[-1].exit_code == errors.CHECKPOINT
    code = errors.DEVICE if rank.state == LOST else errors.CHECKPOINT if refused else errors.RUNNING
    return Ending(code, f"rank {rank.number} is {rank.state}: {rank.reason}; see `evrun logs {rank.number}`")
