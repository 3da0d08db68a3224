"""`evrun bench`: hands over to `python -m evrun.bench`, whose process may import torch."""

from __future__ import annotations

import subprocess
import sys

import click


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Measure; every figure beside its floor. `evrun bench --help` lists the benchmarks."""
    sys.stdout.flush()
    raise click.exceptions.Exit(subprocess.call([sys.executable, "-m", "evrun.bench", *arguments]))
