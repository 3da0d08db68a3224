"""`evrun kill`, `evrun restart`, `evrun stop`: one command to the launcher each."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import click

from evrun.expert_worker.wire.errors import RunError, UsageError
from evrun.launch.config import run_name
from evrun.launch.options import name_option

SIGNALS = ("TERM", "KILL", "STOP", "CONT")
STOP_WITHIN_S = 10.0


@click.command("kill")
@click.argument("rank")
@click.option("--signal", "signal_name", metavar=f"[{'|'.join(SIGNALS)}]", default="TERM", help="[default: TERM]")
@click.option("--hold", is_flag=True, help="Keep the rank down until `evrun restart RANK`.")
@name_option
def kill(rank: str, signal_name: str, hold: bool, name: str | None) -> int:
    """Send a signal to a rank's process. What follows is what follows any death or stall."""
    from evrun.launch import control

    if signal_name not in SIGNALS:
        raise UsageError(f"--signal: expected one of {', '.join(SIGNALS)}, found {signal_name!r}")
    return _tell(name, control.Kill(_rank(rank), int(signal.Signals[f"SIG{signal_name}"]), hold))


@click.command("restart")
@click.argument("rank")
@name_option
def restart(rank: str, name: str | None) -> int:
    """Replace a rank's process by a new one; also revives a rank that failed, was lost or is held down."""
    from evrun.launch import control

    return _tell(name, control.Restart(_rank(rank)))


@click.command("stop")
@name_option
def stop(name: str | None) -> int:
    """End a run: every process, socket and file of it."""
    from evrun.launch import control
    from evrun.launch.run_dir import find_run

    info = find_run(run_name(name, os.environ), os.environ)
    control.ask(info, control.Stop("evrun stop"))
    deadline = time.monotonic() + STOP_WITHIN_S
    while info.is_running:
        if time.monotonic() > deadline:
            raise RunError(
                f"run {info.name!r}: launcher pid {info.launcher_pid} did not end within {STOP_WITHIN_S:g} s; see `evrun logs launcher`"
            )
        time.sleep(0.02)
    return 0


def _rank(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 4:
        raise UsageError(f"RANK: expected an integer >= 0, found {text!r}")
    return int(text)


def _tell(name: str | None, message: Any) -> int:
    from evrun.launch import control
    from evrun.launch.run_dir import find_run

    info = find_run(run_name(name, os.environ), os.environ)
    click.echo(control.ask(info, message).text, err=True)
    return 0
