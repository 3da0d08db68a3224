"""What the coordinator process is started with: its only argument is the path of this, as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class CoordinatorSpec:
    """One incarnation of the coordinator of one run."""

    run_id: str
    name: str
    secret: str
    incarnation: int
    world_size: int
    checkpoint: str
    device: str
    """`cpu` or `cuda:GPU-<uuid>`."""
    cpus: list[int]
    threads: int
    numerics: str
    """`reference` or `weights-only`."""
    dtype: str
    """`bfloat16` or `float32`: values between operations."""
    dense_dtype: str
    """`fp8` or `bfloat16`: how dense fp8 weights are held."""
    deal: str
    combine: str
    prefill_chunk: int
    """Tokens of a prefill piece; also what the slots are sized for."""
    max_context: int
    on_loss: str
    transport: str
    stall_timeout_s: float
    kill_timeout_s: float
    first_call_timeout_s: float
    start_timeout_s: float
    hub_address: str
    """ZeroMQ ipc address the workers connect to; bound by the coordinator."""
    requests_path: str
    """AF_UNIX path that clients connect to; bound by the coordinator."""
    supervision_fd: int
    """AF_UNIX SOCK_SEQPACKET to the launcher (wire.supervision)."""
    call_fd: int
    reply_fds: list[int]
    request_bell_fds: list[int]
    reply_bell_fds: list[int]
    lifeline_fd: int
    launcher_pid: int
    cache_dir: str
    """Folder for derived data that survives a run (the Engram token map)."""
    max_queue: int = 16
    check_payload: bool = False
    log_level: str = "INFO"
    faults: list[dict[str, str | int | float]] = field(default_factory=list)

    def dump(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> CoordinatorSpec:
        return cls(**json.loads(Path(path).read_text()))
