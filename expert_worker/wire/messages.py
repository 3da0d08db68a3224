"""What the coordinator and a worker say to each other. Payloads (x, ids, weights, results) lie in the slots."""

from __future__ import annotations

from dataclasses import dataclass

from evrun.expert_worker.wire.codec import Codec

codec = Codec("experts")

COUNTERS = ("card", "registered", "arena", "in-place", "cache hits", "cache misses", "cache evictions")
"""What Partial.counters counts since the incarnation started: bytes of rows from each rung, then rows in the card cache."""


@codec.register
@dataclass(frozen=True)
class Hello:
    """Worker -> coordinator, first: who I am. Nothing else from this peer counts before the secret fits."""

    secret: str
    run_id: str
    rank: int
    incarnation: int
    pid: int


@codec.register
@dataclass(frozen=True)
class Ready:
    """Worker -> coordinator: the self-test passed, calls are welcome. Strings are what the build report and `ps` show."""

    rank: int
    incarnation: int
    device: str
    backend: str
    rung: str
    threads: int
    load_s: float


@codec.register
@dataclass
class Call:
    """Coordinator -> worker: compute these experts for the activation in a slot. (Not frozen: that triples what making one costs.)"""

    run_id: str
    incarnation: int
    sequence: int
    layer: int
    slot: int
    tokens: int
    experts: list[int]
    """Ascending."""
    checksum: bool
    """Whether the partial must carry a CRC-32 of its payload."""


@codec.register
@dataclass
class Partial:
    """Worker -> coordinator: the result lies in this rank's reply memory."""

    run_id: str
    incarnation: int
    sequence: int
    layer: int
    rows: int
    """(token, expert) pairs computed; with combine `exact` also the rows of the result."""
    checksum: int
    """CRC-32 of the result's bytes, or -1."""
    counters: list[int]
    """As COUNTERS names them."""
    compute_s: float


@codec.register
@dataclass(frozen=True)
class Failed:
    """Worker -> coordinator: this call cannot be answered because of its data; the worker itself is well."""

    run_id: str
    incarnation: int
    sequence: int
    layer: int
    cause: str
    """Stable text of the cause: the same call failing with the same cause on a second rank is the request's error."""


@codec.register
@dataclass(frozen=True)
class Stop:
    """Coordinator -> worker: exit 0 after the call in hand."""

    reason: str
