"""`python -m evrun.bench NAME ...`: what `evrun bench` runs, in a process that may import torch."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from evrun.bench import report
from evrun.expert_worker.wire.errors import EvrunError
from evrun.kernels.cuda.errors import DeviceError, UnavailableError

as_json = click.option("--json", "as_json", is_flag=True, help="One object on stdout.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure; every figure beside its floor."""


@bench.command()
@click.option("--world", "worlds", default="1,2,4,8", show_default=True, help="Worker counts.")
@click.option("--calls", default=3000, show_default=True, type=click.IntRange(min=10))
@as_json
def ipc(worlds: str, calls: int, as_json: bool) -> None:
    """Round trip of a layer call with an empty kernel."""
    from evrun.bench import ipc as module

    report.show("ipc", module.run([int(w) for w in worlds.split(",")], calls), as_json)


@bench.command()
@click.option("--checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Default: one of full-size rows.")
@click.option("--workers", default="cpu", show_default=True, help="Devices, as in cuda:0,cuda:1.")
@click.option("--tokens", default="1,64", show_default=True)
@click.option("--calls", default=60, show_default=True, type=click.IntRange(min=5))
@as_json
def layer(checkpoint: Path | None, workers: str, tokens: str, calls: int, as_json: bool) -> None:
    """Whole layer calls through real workers, phase by phase."""
    from evrun.bench import layer as module

    report.show("layer", module.run(checkpoint, workers.split(","), [int(t) for t in tokens.split(",")], calls), as_json)


@bench.command()
@click.option("--cards", default="0", show_default=True, help="Visible cards, as in 0,1.")
@as_json
def link(cards: str, as_json: bool) -> None:
    """Host to card: pinned memory and registered file mapping, each card alone and all together."""
    from evrun.bench import link as module

    report.show("link", module.run([int(c) for c in cards.split(",")]), as_json)


@bench.command()
@click.option("--card", default=0, show_default=True)
@as_json
def stage(card: int, as_json: bool) -> None:
    """Page cache into pinned memory: threads, fresh pins, cold against warm."""
    from evrun.bench import stage as module

    report.show("stage", module.run(card), as_json)


def main() -> int:
    """As `evrun.launch.cli.main`: errors are one line."""
    try:
        bench.main(prog_name="evrun bench", standalone_mode=False)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        click.echo(f"evrun: {error.format_message()}; see --help", err=True)
        return 2
    except EvrunError as error:
        click.echo(f"evrun: {error}", err=True)
        return error.exit_code
    except (UnavailableError, DeviceError) as error:
        click.echo(f"evrun: {error}", err=True)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
