"""A launch from its settings to its exit code: check, plan, make the run's files and descriptors, supervise, tidy up."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.errors import RUNNING, EvrunError
from evrun.expert_worker.wire.logs import DescriptorHandler, LineFormatter
from evrun.launch import cpu_kernel, demo, devices
from evrun.launch.answer import answer, print_json
from evrun.launch.card_trial import try_cards
from evrun.launch.channels import Channels
from evrun.launch.client import CancelledError
from evrun.launch.config import RequestConfig, RunConfig
from evrun.launch.crew import Crew
from evrun.launch.faults import read_faults
from evrun.launch.http.config import ServeConfig
from evrun.launch.http.front import FrontEnd
from evrun.launch.logs import LogFolder, log_folder
from evrun.launch.plan import Plan, Wiring, cards_wanted, check_request, make_plan
from evrun.launch.process import start_time
from evrun.launch.report import Result
from evrun.launch.run_dir import RunDir, RunInfo, base_dir
from evrun.launch.screen import Screen
from evrun.launch.signals import Signals
from evrun.launch.streams import drop
from evrun.launch.supervisor import Ending, Supervisor

JOIN_WITHIN_S = 2.0
LOST_WITHIN_S = 4.0
"""How long a client that lost its coordinator waits for the launcher to say why."""
log = logging.getLogger("launcher")


def launch(
    config: RunConfig,
    request: RequestConfig | None,
    screen: Screen,
    signals: Signals,
    strict: bool = False,
    on_log: Callable[[int], None] = lambda fd: None,
    serve: ServeConfig | None = None,
) -> Ending:
    """Run until the end: of the request when there is one, else until somebody asks for it.

    strict  end the run when a rank cannot be started (a detached launch promises every rank)
    on_log  called with the descriptor of the launcher's log file once that is open
    serve   run the HTTP front end too, and replace a coordinator that dies
    Raises EvrunError for what is wrong before anything was started, Interrupted for a signal until then.
    """
    base, note = base_dir(os.environ)
    if note:
        screen.note(note)
    with RunDir.acquire(base, config.name) as run_dir:
        for note in run_dir.notes:
            screen.note(note)
        plan, model, notes = _plan(config, request)
        logs = LogFolder.open(log_folder(config.name, os.environ))
        for note in notes:
            screen.note(note)
        handler = _log_to(logs, screen, config.log_level)
        on_log(handler.fd)
        try:
            with contextlib.ExitStack() as stack:
                front = None if serve is None else stack.enter_context(FrontEnd(serve, model))
                channels = Channels(plan.world, plan.layout.call_bytes, plan.layout.reply_bytes, config.transport == "doorbell")
                stack.enter_context(channels)
                wiring = _wire(run_dir, channels)
                info = _info(plan, wiring, logs)
                crew = Crew(plan, run_dir, logs, wiring, screen, front)
                supervisor = Supervisor(plan, crew, channels, wiring, run_dir.socket_path("control"), signals, screen, strict)
                run_dir.write_info(info)
                if front is not None:
                    screen.note(f"model {front.config.served_model_name!r} at {front.url}/v1; 503 until it is loaded")
                signals.raising = False
                return _supervise(supervisor, info, request, screen, signals)
        finally:
            logging.getLogger().removeHandler(handler)
            os.close(handler.fd)


def _plan(config: RunConfig, request: RequestConfig | None) -> tuple[Plan, ModelConfig, list[str]]:
    """The plan, the model's geometry, and what people should know. Everything that can be refused is refused here."""
    checkpoint = Checkpoint.open(config.checkpoint)
    machine = devices.look(os.environ)
    verdicts = try_cards(cards_wanted(config, machine), config, checkpoint.config, _cache_dir())
    unfit = {uuid: verdict.unfit for uuid, verdict in verdicts.items()}
    plan = make_plan(config, machine, checkpoint.config, checkpoint.identity(), read_faults(config.faults), unfit)
    if request is not None:
        check_request(request, checkpoint.config, plan.max_context)
    plan = plan.with_card_kernels({f"cuda:{uuid}": (v.kernel, v.passed_over) for uuid, v in verdicts.items()})
    if plan.uses_cpu:
        plan = plan.with_cpu_kernel(*cpu_kernel.choose(config.cpu_kernel))
    return plan, checkpoint.config, [*demo.note(config.checkpoint), *checkpoint.warnings, *plan.notes]


def _supervise(supervisor: Supervisor, info: RunInfo, request: RequestConfig | None, screen: Screen, signals: Signals) -> Ending:
    if request is None:
        ready = f"run {info.name!r} serves; `evrun generate --name {info.name} --prompt TEXT` asks it, Ctrl-C or `evrun stop` ends it"
        ending = supervisor.run(lambda: screen.note(ready))
        # A run that served until a signal ended it did what it was to do.
        return Ending(0, None, ending.asked_by) if supervisor.ready and ending.error is None else ending
    asker = Asker(supervisor, info, request, screen, signals)
    try:
        ending = supervisor.run(asker.start)
    finally:
        asker.cancel()
    return asker.verdict(ending)


class Asker:
    """The request of a launch with a prompt: a client in a thread of its own, while the loop goes on in the main one."""

    def __init__(self, supervisor: Supervisor, info: RunInfo, request: RequestConfig, screen: Screen, signals: Signals) -> None:
        self._supervisor, self._info, self._request, self._screen, self._signals = supervisor, info, request, screen, signals
        self._thread = threading.Thread(target=self._ask, name="request", daemon=True)
        self._cancel_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._result: Result | None = None
        self._object = threading.Lock()
        """Held by whoever prints the JSON object: there is one."""

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        """End the thread: its request is over, or no longer wanted."""
        os.eventfd_write(self._cancel_fd, 1)
        if self._thread.ident is not None:
            self._thread.join(JOIN_WITHIN_S)

    def verdict(self, ending: Ending) -> Ending:
        """The launch's end: the request's result, unless something else ended the run before there was one."""
        failed = self._result is None and ending.error is not None and ending.exit_code == RUNNING
        if failed and self._request.json and self._may_print():
            result = Result()
            result.fail(ending.exit_code, ending.error or "")
            print_json(result, self._info, [], self._request)
        if self._result is None or ending.by_signal:
            return ending
        return Ending(self._result.exit_code, self._result.error)

    def _ask(self) -> None:
        try:
            self._result = answer(
                self._info, self._request, self._screen, self._supervisor.report, self._cancel_fd, self._why_lost, self._may_print
            )
        except CancelledError:
            return
        except BrokenPipeError:
            drop(sys.stdout)
            self._end(Ending(128 + 13, None, "nobody reads the answer"))
            return
        except Exception as error:
            log.exception("the request failed in the launcher")
            self._end(
                Ending(RUNNING, f"the request failed: {type(error).__name__}: {error}; see `evrun logs launcher --name {self._info.name}`")
            )
            return
        self._end(Ending(self._result.exit_code, self._result.error, "the request is done"))

    def _end(self, ending: Ending) -> None:
        self._supervisor.end(ending)
        self._signals.wake()

    def _may_print(self) -> bool:
        return self._object.acquire(blocking=False)

    def _why_lost(self) -> str:
        self._supervisor.ended.wait(LOST_WITHIN_S)
        ending = self._supervisor.ending
        return (ending.error or ending.asked_by) if ending is not None else ""


def _cache_dir() -> str:
    """Where derived data lives that survives a run."""
    return str(Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "evrun")


def _wire(run_dir: RunDir, channels: Channels) -> Wiring:
    return Wiring(
        run_id=run_dir.run_id,
        secret=secrets.token_hex(32),
        hub_address=f"ipc://{run_dir.socket_path('hub')}",
        requests_path=run_dir.socket_path("requests"),
        call_fd=channels.call_fd,
        call_read_fd=channels.call_read_fd,
        reply_fds=channels.reply_fds,
        request_bell_fds=channels.request_bell_fds,
        reply_bell_fds=channels.reply_bell_fds,
        lifeline_fd=channels.lifeline_fd,
        launcher_pid=os.getpid(),
        cache_dir=_cache_dir(),
    )


def _info(plan: Plan, wiring: Wiring, logs: LogFolder) -> RunInfo:
    config = plan.config
    return RunInfo(
        run_id=wiring.run_id,
        name=config.name,
        launcher_pid=os.getpid(),
        launcher_started=start_time(os.getpid()) or 0,
        secret=wiring.secret,
        control_address=wiring.hub_address.replace("/hub-", "/control-"),
        requests_path=wiring.requests_path,
        log_dir=str(logs.path),
        world=plan.world,
        deal=config.deal,
        combine=config.combine,
        numerics=config.numerics,
        dtype=config.dtype,
    )


def _log_to(logs: LogFolder, screen: Screen, level: str) -> DescriptorHandler:
    """Send this process's log records to launcher.1.log; a full disk is said once and costs lines, never the run."""
    try:
        fd = logs.create("launcher", None, 1)
    except OSError as error:
        screen.note(f"log folder {logs.path}: {error.strerror}; the run goes on, log lines are lost")
        fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    handler = DescriptorHandler(
        fd, lambda error: screen.note(f"log folder {logs.path}: {error.strerror}; the run goes on, log lines are lost")
    )
    handler.setFormatter(LineFormatter("launcher", None, 1))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level)
    return handler


def error_of(ending: Ending) -> EvrunError | None:
    """The ending's one line, as what commands raise."""
    if ending.error is None:
        return None
    error = EvrunError(ending.error)
    error.exit_code = ending.exit_code
    return error
