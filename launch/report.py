"""What a request came to, for people (lines on stderr) and for programs (the JSON object of `--json`). Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from evrun.expert_worker.wire.requests import Finished, Started, Token

MOST_TOKENS_SHOWN = 32
WORKER_FIELDS = ("rank", "device", "backend", "incarnation", "restarts")


@dataclass
class Result:
    """A request's answer as far as it came. `error` and `exit_code` are set when it did not come to its end."""

    started: Started | None = None
    finished: Finished | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    top_logits: list[list[list[int | str | float]]] = field(default_factory=list)
    error: str | None = None
    exit_code: int = 0

    def take(self, token: Token) -> None:
        self.token_ids.append(token.token_id)
        self.text += token.text
        self.top_logits.append(token.top_logits)

    def finish(self, finished: Finished) -> None:
        self.finished = finished
        self.token_ids, self.text = finished.token_ids, finished.text
        if finished.error is not None:
            self.fail(finished.exit_code or 5, finished.error)

    def fail(self, exit_code: int, error: str) -> None:
        self.exit_code, self.error = exit_code, error


def prompt_line(started: Started) -> str:
    """`prompt 5 tokens: ['The', ...]`."""
    shown = ", ".join(repr(token) for token in started.prompt_tokens[:MOST_TOKENS_SHOWN])
    count = len(started.prompt_ids)
    more = f", ... {count - MOST_TOKENS_SHOWN} more" if count > MOST_TOKENS_SHOWN else ""
    return f"prompt {count} token{'' if count == 1 else 's'}: [{shown}{more}]"


def end_line(finished: Finished) -> str:
    """`3 tokens in 0.9 s (prefill 0.30 s, 16.7 tokens/s; decode 0.60 s, 3.3 tokens/s), stopped on eos`."""
    count = len(finished.token_ids)
    prefill = _pace("prefill", finished.prefill_tokens, finished.prefill_s)
    decode = _pace("decode", finished.decode_tokens, finished.decode_s)
    total_s = finished.prefill_s + finished.decode_s
    resends = f", {finished.resends} resend{'' if finished.resends == 1 else 's'}" if finished.resends else ""
    stopped = finished.stopped_on if finished.stopped_on in ("eos", "length") else repr(finished.stopped_on)
    return f"{count} token{'' if count == 1 else 's'} in {total_s:.1f} s ({prefill}; {decode}), stopped on {stopped}{resends}"


def _pace(what: str, tokens: int, seconds: float) -> str:
    rate = tokens_per_second(tokens, seconds)
    return f"no {what}" if rate is None else f"{what} {seconds:.2f} s, {rate:.1f} tokens/s"


def tokens_per_second(tokens: int, seconds: float) -> float | None:
    """None where nothing was done: a first token that ends the text leaves no decode to measure."""
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def json_object(result: Result, settings: dict[str, Any], workers: list[dict[str, Any]], with_top_logits: bool) -> dict[str, Any]:
    """The object of the contract.

    settings  world, deal, combine, numerics, dtype
    workers   rows of `ps --json`
    """
    done = result.finished
    seconds = (
        {"load": done.load_s, "prefill": done.prefill_s, "decode": done.decode_s} if done else dict.fromkeys(("load", "prefill", "decode"))
    )
    rates = {
        "prefill": tokens_per_second(done.prefill_tokens, done.prefill_s) if done else None,
        "decode": tokens_per_second(done.decode_tokens, done.decode_s) if done else None,
    }
    found: dict[str, Any] = {
        "prompt_ids": result.started.prompt_ids if result.started else [],
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": "error" if result.error is not None or done is None else done.finish_reason,
        "error": result.error,
        "world": settings["world"],
        "workers": [{name: row[name] for name in WORKER_FIELDS} for row in workers if row["role"] == "worker"],
        "deal": settings["deal"],
        "combine": settings["combine"],
        "numerics": settings["numerics"],
        "dtype": settings["dtype"],
        "seconds": seconds,
        "tokens_per_second": rates,
        "resends": done.resends if done else 0,
    }
    if with_top_logits:
        found["top_logits"] = result.top_logits
    return found
