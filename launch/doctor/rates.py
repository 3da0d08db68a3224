"""Measured rates that a prediction needs: what is asked for, what comes back. Measured in a child (`evrun.bench.rates`), which may
import torch and make contexts on cards."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evrun.expert_worker.wire.errors import RunError
from evrun.launch.process import Exit, child_environment

WITHIN_S = 180.0


@dataclass(frozen=True)
class Rate:
    """Seconds that work over `count` bytes of weights takes: one token, or a pass of several.

    A pass of T tokens takes bytes / pass_bytes_per_s, whatever T, and bytes * T / token_bytes_per_s on top.
    """

    single_bytes_per_s: float
    pass_bytes_per_s: float
    token_bytes_per_s: float

    def seconds(self, count: float, tokens: float) -> float:
        if tokens <= 1:
            return count / self.single_bytes_per_s
        return max(count / self.pass_bytes_per_s + count * tokens / self.token_bytes_per_s, count / self.single_bytes_per_s)

    @classmethod
    def fit(cls, count: float, single_s: float, few: tuple[int, float], many: tuple[int, float]) -> Rate:
        """From seconds for one token, and (tokens, seconds) of two passes over `count` bytes."""
        slope = max((many[1] - few[1]) / (many[0] - few[0]), 1e-12)
        rest = max(few[1] - slope * few[0], 1e-9)
        return cls(count / single_s, count / rest, count / slope)


@dataclass(frozen=True)
class CardRate:
    """One card: each rung that its driver takes, and its kernels."""

    registered_bytes_per_s: float | None
    registered_how: str
    """Which kind of registration works, or why none does."""
    arena_bytes_per_s: float | None
    experts: Rate
    """Kernels over rows in card memory."""
    cache_bytes: int
    """Card memory that is free for rows."""


@dataclass(frozen=True)
class Wanted:
    """What is to be measured: geometry, and where processes would run."""

    checkpoint: str
    """Folder, or empty: the release's geometry."""
    coordinator_cpus: list[int]
    coordinator_threads: int
    worker_cpus: list[int]
    """One CPU of each core that workers would have; empty without CPU workers."""
    world: int
    cpu_kernel: str
    numerics: str
    dtype: str
    dense_dtype: str
    context: int
    """Position at which the dense tree is timed."""
    cards: list[str]
    """UUIDs."""
    arena_threads: int
    cache_dir: str
    cold_bytes: int
    """Bytes of rows to read that are not in the page cache; 0: not needed."""

    @classmethod
    def load(cls, path: str) -> Wanted:
        return cls(**json.loads(Path(path).read_text()))


@dataclass(frozen=True)
class Rates:
    """Everything in bytes and seconds."""

    expert_cores: int
    """Cores that `experts` was measured with, all at once."""
    experts: Rate | None
    attention: Rate
    """Everything of a layer before the routed experts are handed out, and after they are back."""
    shared: Rate
    head: Rate
    call_s: float
    """An empty layer call to all ranks and back."""
    copy_bytes_per_s: float
    cold_bytes_per_s: float | None
    """Rows that are not in the page cache, read by touching them as a worker does."""
    cold_source: str
    cards: dict[str, CardRate] = field(default_factory=dict)
    """By UUID."""
    failed_cards: dict[str, str] = field(default_factory=dict)
    took_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Rates:
        rates = {name: raw[name] and Rate(**raw[name]) for name in ("experts", "attention", "shared", "head")}
        cards = {uuid: CardRate(**{**card, "experts": Rate(**card["experts"])}) for uuid, card in raw["cards"].items()}
        return cls(**{**raw, **rates, "cards": cards})


def measure(wanted: Wanted) -> Rates:
    """Raises RunError when the child fails."""
    with tempfile.NamedTemporaryFile("w", prefix="evrun-doctor-", suffix=".json") as spec:
        json.dump(dataclasses.asdict(wanted), spec)
        spec.flush()
        command = [sys.executable, "-m", "evrun.bench.rates", spec.name]
        environment = child_environment(os.environ, wanted.coordinator_threads)
        try:
            found = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd="/", env=environment, timeout=WITHIN_S
            )
        except subprocess.TimeoutExpired:
            raise RunError(f"measuring took more than {WITHIN_S:g} s; is the machine busy?") from None
    if found.returncode:
        words = found.stderr.strip().splitlines()
        raise RunError(f"measuring {Exit.of(found.returncode)}{': ' + words[-1] if words else ''}")
    return Rates.from_json(json.loads(found.stdout))
