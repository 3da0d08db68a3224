"""The result of a benchmark: one object for programs, one table for people."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, str | int | float | None]
UNITS = {"seconds": 1e6, "p99_seconds": 1e6, "floor_seconds": 1e6}
"""Columns shown in microseconds."""


def machine() -> str:
    """Processor, cores this process may use, and cards, in words."""
    names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    words = [f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"]
    try:
        import pynvml

        pynvml.nvmlInit()
        words += [str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i))) for i in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no card is no fault
        words.append("no card")
    return "; ".join(words)


def versions() -> dict[str, str]:
    """Of Python and of the packages that have a part in the figures."""
    found = {"python": platform.python_version(), "linux": platform.release()}
    for package in ("evrun", "numpy", "torch", "pyzmq"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def timed(seconds: list[float], floor_seconds: float | None = None, **more: Any) -> Row:
    """A row of medians. `ratio` is time over the floor of the same run."""
    row: Row = {**more, "seconds": median(seconds), "p99_seconds": percentile(seconds, 0.99), "samples": len(seconds)}
    if row.get("bytes"):
        row["gb_per_s"] = float(more["bytes"]) / median(seconds) / 1e9
    if floor_seconds is not None:
        row |= {"floor_seconds": floor_seconds, "ratio": median(seconds) / floor_seconds}
    return row


def show(bench: str, rows: list[Row], as_json: bool) -> None:
    """stdout: the object with `as_json`, else a table."""
    if as_json:
        result = {"bench": bench, "machine": machine(), "versions": versions(), "rows": rows}
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
        return
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(title=f"evrun bench {bench}: {machine()}")
    for column in columns:
        table.add_column(f"{column.replace('seconds', 'us')}" if column in UNITS else column, justify="right")
    for row in rows:
        table.add_row(*(_shown(column, row.get(column)) for column in columns))
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(table)


def _shown(column: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value * UNITS.get(column, 1):.4g}" if column not in UNITS else f"{value * UNITS[column]:.1f}"
    return "" if value is None else str(value)
