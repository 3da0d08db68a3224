"""Cards by the names that people give them, and where compiled kernels are kept."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from evrun.expert_worker.wire.errors import UsageError
from evrun.kernels.cuda import driver

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evrun"


def uuids(workers: Sequence[str]) -> list[str]:
    """UUIDs of `cuda:K`, K counting the visible cards. Raises UsageError, UnavailableError."""
    visible = driver.device_uuids()
    found = []
    for worker in workers:
        kind, _, index = worker.partition(":")
        if kind != "cuda" or not index.isdigit() or int(index) >= len(visible):
            raise UsageError(f"--workers: expected cuda:0 to cuda:{len(visible) - 1}, found {worker!r}")
        found.append(visible[int(index)])
    return found
