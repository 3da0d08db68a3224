"""The command `evrun`: a table of commands, each imported when it is called, and what any error looks like to a user.

Nothing here or below imports torch, so that `evrun --help` is quick and the launcher stays small.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib import metadata

import click

from evrun.expert_worker.wire.errors import RUNNING, USAGE, EvrunError
from evrun.launch.signals import Interrupted
from evrun.launch.streams import complete, drop, settle

COMMANDS = {
    "launch": ("evrun.launch.commands.launch:command", "Start a run; with a prompt: generate, print, stop."),
    "serve": ("evrun.launch.commands.serve:command", "Start a run and an OpenAI-compatible HTTP server for it."),
    "generate": ("evrun.launch.commands.generate:command", "Ask a run that is up."),
    "ps": ("evrun.launch.commands.ps:command", "Show the processes of a run."),
    "logs": ("evrun.launch.commands.logs:command", "Print the log of a process."),
    "kill": ("evrun.launch.commands.control:kill", "Send a signal to a rank's process."),
    "restart": ("evrun.launch.commands.control:restart", "Replace a rank's process, or revive it."),
    "stop": ("evrun.launch.commands.control:stop", "End a run."),
    "inspect": ("evrun.launch.commands.inspect:command", "Check a checkpoint: whole, sound, the release."),
    "doctor": ("evrun.launch.commands.doctor:command", "Look at this machine: does it fit, how fast will it be."),
    "bench": ("evrun.launch.commands.bench:command", "Measure; every figure beside its floor."),
    "make-checkpoint": ("evrun.launch.make_checkpoint:make_checkpoint", "Write a checkpoint of any geometry."),
}
"""Name -> (module:attribute, one line of help). A new command is one line."""


class LazyGroup(click.Group):
    """Lists commands from the table and imports only the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def _show_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        try:
            click.echo(f"evrun {metadata.version('evrun')}")
        except metadata.PackageNotFoundError:
            click.echo("evrun, from a source tree that is not installed")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version.")
def cli() -> None:
    """DeepSeek-V4.1-Flash on one host: a coordinator, and workers that may die.

    Exit codes: 0 done, 2 usage, 3 checkpoint refused, 4 device or memory missing, 5 failed while running.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code. An error is one line on stderr, never a traceback."""
    complete()
    try:
        result = cli.main(arguments, prog_name="evrun", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        return _fail(USAGE, " ".join(error.format_message().split()) + "; see --help")
    except EvrunError as error:
        return _fail(error.exit_code, str(error))
    except Interrupted as interrupted:
        return 128 + interrupted.number
    except (KeyboardInterrupt, click.Abort):
        return 128 + signal.SIGINT
    except BrokenPipeError:
        drop(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            return _unexpected(error)
        return _fail(RUNNING, f"{error.filename or 'the answer'} cannot be written: {error.strerror}")
    except Exception as error:
        return _unexpected(error)
    finally:
        settle()


def _unexpected(error: Exception) -> int:
    where = _keep_traceback()
    return _fail(RUNNING, f"unexpected {type(error).__name__}: {error}; the traceback is in {where}, please report it")


def _fail(exit_code: int, text: str) -> int:
    with contextlib.suppress(OSError):  # the terminal may be gone; the exit code still tells
        print(f"evrun: {text}", file=sys.stderr, flush=True)  # noqa: T201
    return exit_code


def _keep_traceback() -> str:
    text = traceback.format_exc()
    try:
        fd, path = tempfile.mkstemp(prefix="evrun-error-", suffix=".log")
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        return f"no file ({error.strerror})"
    return path


if __name__ == "__main__":
    sys.exit(main())
