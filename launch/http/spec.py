"""What the HTTP process is started with: its only argument is the path of this, as JSON (0600, in the run's 0700 folder)."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HttpSpec:
    """One incarnation of the front end of one run."""

    run_id: str
    name: str
    secret: str
    incarnation: int
    control_address: str
    """ZeroMQ ipc address of the launcher."""
    requests_path: str
    """AF_UNIX path of the coordinator."""
    listen_fd: int
    """The listening socket, made by the launcher: connections wait in it while this process is replaced."""
    host: str
    launcher_pid: int
    checkpoint: str
    model_name: str
    max_context: int
    vocab_size: int
    bos_token_id: int
    eos_token_id: int
    max_queue: int
    key_sha256: str
    """Hex; empty: no key is asked for."""
    stall_s: float
    """A rank whose record stands still for longer does not count as serving."""
    stuck_s: float
    """A running request without a finished layer for longer makes the service unhealthy."""
    drain_s: float
    """From SIGTERM to the end of requests that still run."""
    log_level: str

    def dump(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> HttpSpec:
        return cls(**json.loads(Path(path).read_text()))
