"""Scripted faults for tests: read from a file that a hidden option names, handed to the processes in their specs.

`[[faults]]` tables of a TOML file, or a JSON list: each names its `rank` (a number, or `coordinator`); the rest is for
the process that acts on it.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from evrun.expert_worker.wire.errors import UsageError

Fault = dict[str, str | int | float]


def read_faults(path: str | None) -> list[Fault]:
    """Raises UsageError for a file that cannot be read or holds something else."""
    if path is None:
        return []
    try:
        text = Path(path).read_text(encoding="utf-8")
        if path.endswith(".toml"):
            found = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(text).get("faults")
        else:
            found = json.loads(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"--faults {path}: expected a readable TOML or JSON file, found: {error}") from None
    if not isinstance(found, list) or not all(isinstance(f, dict) and "rank" in f for f in found):
        raise UsageError(f"--faults {path}: expected a list of tables that each name a rank")
    return found
