"""`evrun launch`."""

from __future__ import annotations

import os
from typing import Any

import click

from evrun.launch.config import RequestConfig, RunConfig, launch_settings, unknown_variables
from evrun.launch.options import config_option, options_of


@click.command("launch")
@options_of(RunConfig)
@options_of(RequestConfig)
@config_option
def command(**flags: Any) -> int:
    """Start coordinator and workers on a checkpoint.

    With a prompt: generate, print, stop everything. Without one: serve `evrun generate` until Ctrl-C or `evrun stop`.
    Every option may also be set as EVRUN_OPTION or in a TOML file (--config).
    """
    run, request = launch_settings(flags, os.environ)
    from evrun.launch.launcher import error_of, launch
    from evrun.launch.screen import Terminal
    from evrun.launch.signals import Signals

    screen = Terminal()
    for name in unknown_variables(os.environ):
        screen.note(f"{name} is no setting of evrun; ignored")
    try:
        with Signals() as signals:
            if run.detach:
                from evrun.launch.detach import launch_detached

                return launch_detached(run, screen)
            ending = launch(run, request, screen, signals)
    finally:
        screen.close()
    error = error_of(ending)
    if error is not None:
        raise error
    return ending.exit_code
