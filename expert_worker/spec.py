"""What one worker process is started with: its only argument is the path of this, as JSON.

Descriptors are numbers of descriptors the launcher passes on. The file is 0600 in the run's 0700 folder.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class WorkerSpec:
    """One incarnation of one rank."""

    run_id: str
    name: str
    secret: str
    rank: int
    world_size: int
    incarnation: int
    """1 for the first process of the rank, one more at every restart."""
    checkpoint: str
    shard_identity: dict[str, tuple[int, int, int, int]]
    """Resolved shard path -> (device, inode, size, mtime_ns) at launch; a worker refuses anything else."""
    device: str
    """`cpu`, or `cuda:GPU-<uuid>`."""
    cpus: list[int]
    """The cores this process may use."""
    threads: int
    backend: str
    """Kernel backend by name (`kernels.registry`), on the CPU."""
    numerics: str
    dtype: str
    combine: str
    prefill_chunk: int
    transport: str
    hub_address: str
    """ZeroMQ address of the coordinator's hub."""
    call_fd: int
    """memfd of the calls: written by the coordinator, read by every rank."""
    reply_fd: int
    """memfd of this rank's replies and its progress record."""
    request_bell_fd: int
    reply_bell_fd: int
    """eventfds; -1 with transport zmq."""
    lifeline_fd: int
    """Read end of a pipe that only the launcher holds open: end-of-file means that the launcher is gone."""
    launcher_pid: int
    log_level: str = "INFO"
    faults: list[dict[str, str | int | float]] = field(default_factory=list)
    """Scripted faults, for tests only."""
    card_kernel: str = "cuda"
    """The same on a card."""
    cache_dir: str = ""
    """Folder for derived data that survives a run (compiled kernels)."""
    card_cache_bytes: int = -1
    """Card memory for the row cache; -1: what is free when everything else is allocated."""
    pin_budget_bytes: int = 0
    """Most bytes of shards registered with the driver at a time."""
    timeline: str = ""
    """File for the spans of this process's work (benchmarks only); empty: nothing is timed."""
    rungs: list[str] = field(default_factory=lambda: ["registered", "arena"])
    """Rungs below the card cache that may be used, in order."""

    def dump(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> WorkerSpec:
        raw = json.loads(Path(path).read_text())
        raw["shard_identity"] = {k: tuple(v) for k, v in raw["shard_identity"].items()}
        return cls(**raw)
