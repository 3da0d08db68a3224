"""`launch --detach`: a launcher in the background, and the wait for it in the foreground.

The background process leads its own session, lies in the root folder and holds no descriptor of the caller: its input
is the settings (then nothing), its output goes nowhere, its errors to a nameless file until its log is open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import IO, Any

from evrun.expert_worker.wire.errors import RUNNING, EvrunError
from evrun.launch.config import RunConfig
from evrun.launch.http.config import ServeConfig
from evrun.launch.process import Exit, child_environment
from evrun.launch.screen import Screen, replay

SUPERVISE = ("-m", "evrun.launch.supervise")
"""What the background process runs; a test may put something else here."""
END_WITHIN_S = 6.0


def launch_detached(config: RunConfig, screen: Screen, serve: ServeConfig | None = None) -> int:
    """Start a launcher in the background and return 0 when every rank serves.

    Raises EvrunError with the launch's own exit code otherwise. Interrupted, it ends what it started.
    """
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    with os.fdopen(read_fd, "rb") as events, tempfile.TemporaryFile() as words:
        try:
            background = _start(config, serve, write_fd, words)
        finally:
            os.close(write_fd)
        try:
            for line in events:
                end = replay(line, screen)
                if end is not None:
                    return _settle(background, *end)
        except BaseException:
            _end(background)
            raise
        found = Exit.of(background.wait(END_WITHIN_S))
        words.seek(0)
        said = words.read().decode(errors="replace").strip().splitlines()
        error = f"the launcher {found} during the start{': ' + said[-1] if said else ''}; see `evrun logs launcher --name {config.name}`"
        raise EvrunError(error)


def _start(config: RunConfig, serve: ServeConfig | None, events_fd: int, words: IO[bytes]) -> subprocess.Popen[bytes]:
    background = subprocess.Popen(
        [sys.executable, *SUPERVISE, str(events_fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=words,
        pass_fds=(events_fd,),
        cwd="/",
        env=child_environment(os.environ, 1),
        start_new_session=True,
    )
    assert background.stdin is not None
    with contextlib.suppress(BrokenPipeError), background.stdin as settings:
        served = None if serve is None else dataclasses.asdict(serve)
        settings.write(json.dumps({"run": config.dump(), "serve": served}).encode())
    return background


def _settle(background: subprocess.Popen[bytes], exit_code: int, error: str | None) -> int:
    """0 leaves it to itself; anything else waits for its end, which has begun."""
    if exit_code == 0:
        background.returncode = 0  # not ours to wait for any more
        return 0
    with contextlib.suppress(subprocess.TimeoutExpired):
        background.wait(END_WITHIN_S)
    if error is None:
        return exit_code
    failure = EvrunError(error)
    failure.exit_code = exit_code or RUNNING
    raise failure


def _end(background: subprocess.Popen[Any]) -> None:
    background.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        background.wait(END_WITHIN_S)
