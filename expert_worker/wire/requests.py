"""What a client (`evrun launch`, `evrun generate`, the HTTP front end) and the coordinator say to each other.

One AF_UNIX stream connection per request (`multiprocessing.connection` with the run's secret as authkey, `send_bytes`
and `recv_bytes` only: no pickle). The client sends Generate and may send Cancel; closing the connection cancels too.
The coordinator answers Queued*, Started, then Prefill* and Token*, and ends with Finished or Refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from evrun.expert_worker.wire.codec import Codec

codec = Codec("requests")


@codec.register
@dataclass(frozen=True)
class Generate:
    prompt: str | None
    """Text; None when prompt_ids are given."""
    prompt_ids: list[int] | None
    add_bos: bool
    max_new_tokens: int
    temperature: float
    seed: int
    stop: list[str]
    ignore_eos: bool
    top_logits: int
    """0, or how many candidates to report per token."""
    dump_logits: str | None
    dump_routes: str | None
    dump_activations: str | None
    """Absolute paths the coordinator writes."""
    top_p: float = 1.0
    """Sample among the likeliest tokens whose probabilities reach this sum; 1: among all."""
    logprobs: int = -1
    """-1: none; K >= 0: the log probability of each token, and the K best."""


@codec.register
@dataclass(frozen=True)
class Cancel:
    reason: str


@codec.register
@dataclass(frozen=True)
class Queued:
    ahead: int


@codec.register
@dataclass(frozen=True)
class Started:
    prompt_ids: list[int]
    prompt_tokens: list[str]
    report: str
    """The line of the build report that names the experts, read off what the workers said."""


@codec.register
@dataclass(frozen=True)
class Prefill:
    done: int
    total: int


@codec.register
@dataclass(frozen=True)
class Token:
    token_id: int
    text: str
    """Text that became certain with this token: whole characters, nothing of a stop string; may be empty."""
    top_logits: list[list[int | str | float]]
    """[[id, text, logit] x K], best first."""
    logprobs: list[list[int | str | float]] = field(default_factory=list)
    """[[id, text, log probability] x (1 + K)]: this token, then the K best; empty when not asked for."""


@codec.register
@dataclass(frozen=True)
class Finished:
    token_ids: list[int]
    text: str
    finish_reason: str
    """stop, length or error."""
    stopped_on: str
    """For people: `eos`, the stop string, `length`, or the error."""
    error: str | None
    exit_code: int
    load_s: float
    prefill_s: float
    decode_s: float
    prefill_tokens: int
    decode_tokens: int
    resends: int


@codec.register
@dataclass(frozen=True)
class Refused:
    """The request was not started. exit_code 2 (bad request, queue full), 4 or 5."""

    exit_code: int
    error: str
    queue_full: bool = False
