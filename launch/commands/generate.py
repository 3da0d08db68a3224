"""`evrun generate`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from evrun.expert_worker.wire.errors import EvrunError, UsageError
from evrun.launch.config import RequestConfig, generate_settings
from evrun.launch.options import config_option, name_option, options_of

if TYPE_CHECKING:
    from evrun.launch.run_dir import RunInfo
    from evrun.launch.screen import Screen

ASK_EVERY_S = 0.2


@click.command("generate")
@name_option
@options_of(RequestConfig)
@config_option
def command(**flags: Any) -> int:
    """Ask a run that `evrun launch` started. Ctrl-C cancels the request, not the run."""
    name, request = generate_settings(flags, os.environ)
    from evrun.launch.answer import answer
    from evrun.launch.run_dir import find_run
    from evrun.launch.screen import Terminal

    info = find_run(name, os.environ)
    screen = Terminal()
    try:
        _wait_until_ready(info, screen)
        result = answer(info, request, screen, [], why_lost=lambda: _why_lost(info))
    finally:
        screen.close()
    if result.error is not None:
        error = EvrunError(result.error)
        error.exit_code = result.exit_code
        raise error
    return 0


def _wait_until_ready(info: RunInfo, screen: Screen) -> None:
    """A request may come while the run still loads. Raises UsageError when it ends instead."""
    from evrun.launch import control
    from evrun.launch.screen import Loading

    while True:
        view = json.loads(control.ask(info, control.Ps()).text)
        if view["state"] in ("ready", "serving"):
            return
        if view["state"] == "stopped":
            raise UsageError(f"run {info.name!r} is ending; start it anew with `evrun launch`")
        coordinator = view["processes"][0]
        workers = [row for row in view["processes"] if row["role"] == "worker"]
        waiting = [f"rank {row['rank']}" for row in workers if row["state"] not in ("ready", "serving")]
        screen.loading(Loading(coordinator["reason"] or "starting", 0, 0, waiting))
        time.sleep(ASK_EVERY_S)


def _why_lost(info: RunInfo) -> str:
    """What the coordinator's log says last; its launcher is ending, or about to."""
    from evrun.launch.logs import attempts, last_words

    there = attempts(Path(info.log_dir), "coordinator")
    words = last_words(f"{info.log_dir}/coordinator.{there[-1]}.log") if there else []
    return f"{words[0]} (`evrun logs coordinator --name {info.name}`)" if words else ""
