"""The background process of a detached launch: `python -m evrun.launch.supervise FD`, settings on stdin, events to FD."""

from __future__ import annotations

import json
import logging
import os
import sys

from evrun.expert_worker.wire.errors import RUNNING, EvrunError
from evrun.launch.config import RunConfig
from evrun.launch.http.config import ServeConfig
from evrun.launch.launcher import launch
from evrun.launch.screen import Pipe
from evrun.launch.signals import Interrupted, Signals


def main(events_fd: int) -> int:
    os.set_inheritable(events_fd, False)
    settings = json.loads(sys.stdin.read())
    config = RunConfig.load(settings["run"])
    serve = ServeConfig(**settings["serve"]) if settings["serve"] is not None else None
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.close(null)
    pipe = Pipe(events_fd)
    error: str | None
    try:
        with Signals() as signals:
            ending = launch(config, None, pipe, signals, strict=True, on_log=lambda fd: _stderr_to(fd), serve=serve)
        exit_code, error = ending.exit_code, ending.error
    except EvrunError as refused:
        exit_code, error = refused.exit_code, str(refused)
    except Interrupted as interrupted:
        exit_code, error = 128 + interrupted.number, None
    except Exception as failure:
        logging.getLogger("launcher").exception("the launcher failed")
        exit_code, error = (
            RUNNING,
            f"the launcher failed: {type(failure).__name__}: {failure}; see `evrun logs launcher --name {config.name}`",
        )
    pipe.ended(exit_code, error)
    return exit_code


def _stderr_to(fd: int) -> None:
    os.dup2(fd, 2)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
