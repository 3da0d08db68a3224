"""`evrun serve`."""

from __future__ import annotations

import os
from typing import Any

import click

from evrun.launch.config import RunConfig
from evrun.launch.http.config import ServeConfig, check_libraries, serve_settings, unknown_variables
from evrun.launch.options import config_option, options_of


@click.command("serve")
@options_of(RunConfig)
@options_of(ServeConfig)
@config_option
def command(**flags: Any) -> int:
    """Start coordinator, workers and an OpenAI-compatible HTTP server on a checkpoint.

    POST /v1/completions and /v1/chat/completions, GET /v1/models, /health, /metrics and /v1/status. A worker or a
    coordinator that dies is replaced; Ctrl-C, SIGTERM or `evrun stop` ends everything.
    """
    run, serve = serve_settings(flags, os.environ)
    check_libraries()
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

                return launch_detached(run, screen, serve)
            ending = launch(run, None, screen, signals, serve=serve)
    finally:
        screen.close()
    error = error_of(ending)
    if error is not None:
        raise error
    return ending.exit_code
