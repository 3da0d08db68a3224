"""The steps for people: a table for prefill and one for decode, a line a phase, a column a world and pass."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from evrun.bench.report import Row, machine


def print_steps(rows: Sequence[Row]) -> None:
    """To stdout: milliseconds; in brackets the slowest rank's own, hidden ones too; then GiB/s of what the phase reads."""
    console = Console()
    if not console.is_terminal:
        console.width = 200
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [row for row in rows if row["kind"] == kind]
        first = mine[0]
        what = f"{first['tokens']} tokens" if kind == "prefill" else f"one token, the step in the middle of {first['steps']}"
        table = Table(title=f"{kind}: {what}, ms \\[slowest rank's own] (GiB/s); {first['backend']}; {machine()}", title_justify="left")
        table.add_column("phase")
        runs = list(dict.fromkeys((row["world"], row["pass"]) for row in mine))
        for world, number in runs:
            table.add_column(f"world {world}, pass {number}", justify="right")
        for phase in dict.fromkeys(str(row["phase"]) for row in mine):
            cells = {(row["world"], row["pass"]): _cell(row) for row in mine if row["phase"] == phase}
            table.add_row(phase, *(cells[run] for run in runs))
        console.print(table)


def _cell(row: Row) -> str:
    text = f"{float(row['seconds'] or 0) * 1e3:.3f}"
    if row.get("worker_seconds"):
        text += f" \\[{float(row['worker_seconds'] or 0) * 1e3:.3f}]"
    if row.get("gib_per_s"):
        text += f" ({float(row['gib_per_s'] or 0):.3g})"
    if row.get("of_wall"):
        text += f" ({100 * float(row['of_wall'] or 0):.1f} % of wall)"
    return text
