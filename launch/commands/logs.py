"""`evrun logs`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

import click

from evrun.expert_worker.wire.errors import UsageError
from evrun.launch.config import run_name
from evrun.launch.options import name_option
from evrun.launch.streams import drop


@click.command("logs")
@click.argument("process", metavar="RANK|coordinator|launcher|http")
@click.option("-f", "--follow", is_flag=True, help="Go on as lines come, through restarts, until the run is over.")
@click.option("--attempt", metavar="K", default=None, help="The K-th process of the rank. [default: the newest]")
@name_option
def command(process: str, follow: bool, attempt: str | None, name: str | None) -> int:
    """Print the log of a process, also when the run is over."""
    from evrun.launch import logs

    run = run_name(name, os.environ)
    if attempt is not None and not re.fullmatch(r"[1-9][0-9]{0,8}", attempt):
        raise UsageError(f"--attempt: expected an integer >= 1, found {attempt!r}")
    which = process if process in ("coordinator", "launcher", "http") else f"worker-{process}"
    if which.startswith("worker-") and not re.fullmatch(r"[0-9]{1,4}", process):
        raise UsageError(f"expected a rank, coordinator, launcher or http, found {process!r}")
    over = _over(run) if follow else iter([True, True])
    out = sys.stdout.buffer
    try:
        for data in logs.follow(logs.log_folder(run, os.environ), which, int(attempt) if attempt else None, over):
            out.write(data)
            out.flush()
    except BrokenPipeError:
        drop(sys.stdout)
    return 0


def _over(run: str) -> Iterator[bool]:
    """Whether the run is over, each time anew."""
    from evrun.launch.run_dir import find_run

    while True:
        try:
            yield not find_run(run, os.environ).is_running
        except UsageError:
            yield True
