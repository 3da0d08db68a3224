"""`evrun ps`."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from evrun.launch.config import run_name
from evrun.launch.options import json_option, name_option

COLUMNS = ("process", "state", "pid", "device", "backend", "rung", "attempt", "layer", "progress", "resends", "dropped", "reason")


@click.command("ps")
@name_option
@json_option
def command(name: str | None, as_json: bool) -> int:
    """Show the processes of a run."""
    from evrun.launch import control
    from evrun.launch.run_dir import find_run

    info = find_run(run_name(name, os.environ), os.environ)
    text = control.ask(info, control.Ps()).text
    if as_json:
        click.echo(text)
    else:
        _table(json.loads(text))
    return 0


def _table(view: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(Text(f"run {view['name']} ({view['run']}), launcher pid {view['launcher_pid']}: {view['state']}"))
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in view["processes"]:
        table.add_row(*(Text(cell) for cell in cells(row)))
    console.print(table)


def cells(row: dict[str, Any]) -> list[str]:
    """One process as the table shows it, in the order of COLUMNS."""
    age = row["progress_age_s"]
    return [
        row["role"] if row["rank"] is None else f"{row['role']} {row['rank']}",
        row["state"],
        "-" if row["pid"] is None else str(row["pid"]),
        row["device"],
        row["backend"] or "-",
        row["rung"] or "-",
        str(row["incarnation"]),
        "-" if row["last_layer"] < 0 else str(row["last_layer"]),
        "-" if age is None else f"{age:.1f} s ago",
        str(row["resends"]),
        str(row["dropped_replies"]),
        row["reason"],
    ]
