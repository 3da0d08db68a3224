"""An inspection for people: what matters of it, on one screen."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evrun.launch.inspection.report import Check, Report

COLOURS = {"pass": "green", "fail": "bold red", "undecided": "yellow"}
QUIET_ABOVE = 12
"""With more sound shards than this they become one line."""


def print_report(report: Report) -> None:
    """To stdout: the checks, the groups, then every problem and note in full."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(Text(f"checkpoint {report.directory}"))
    table = Table(box=None, pad_edge=False)
    for column in ("check", "of", "outcome", "found"):
        table.add_column(column, overflow="fold")
    for check in _shortened(report.checks):
        table.add_row(Text(check.name), Text(check.subject), Text(check.outcome, COLOURS[check.outcome]), Text(check.found))
    console.print(table)
    if report.groups:
        console.print(_groups(report))
    if report.payload:
        p = report.payload
        console.print(Text(f"payload: {p['bytes']} bytes in {p['seconds']:.1f} s, {p['gb_per_s']:.2f} GB/s with {p['threads']} thread(s)"))
    for check in report.checks:
        for line in check.problems:
            console.print(Text(f"{check.outcome}: {line}", COLOURS[check.outcome]))
        for line in check.notes:
            console.print(Text(f"note: {line}"))
    counts = report.counts()
    console.print(Text(f"{counts['pass']} pass, {counts['fail']} fail, {counts['undecided']} undecided", COLOURS[report.verdict]))


def _shortened(checks: list[Check]) -> list[Check]:
    """Many sound files are one line."""
    shown: list[Check] = []
    for name in dict.fromkeys(c.name for c in checks):
        same = [c for c in checks if c.name == name]
        sound = [c for c in same if c.outcome == "pass"]
        if len(sound) > QUIET_ABOVE:
            shown.append(Check(name, f"{len(sound)} of {len(same)}", "pass", f"{sound[0].subject} ... {sound[-1].subject}"))
            same = [c for c in same if c.outcome != "pass"]
        shown += same
    return shown


def _groups(report: Report) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("group", "tensors", "bytes", "GiB", "of"):
        table.add_column(column, justify="left" if column == "group" else "right")
    for group in report.groups:
        size, wanted = int(group["bytes"]), int(group["expected_bytes"])
        share = "-" if not wanted else f"{100 * min(1.0, size / wanted):.0f} %"
        table.add_row(Text(str(group["group"])), str(group["tensors"]), str(size), f"{size / 2**30:.3f}", share)
    return table
