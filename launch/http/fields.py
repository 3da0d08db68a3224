"""The fields of a request body, each checked by name: a value that does not fit, or a wish that is not met, is a named 400."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evrun.launch.http.errors import ApiError, bad

MAX_STOPS = 16
MAX_SEED = 2**63
MAX_TOP_LOGPROBS = 20
COMMON = {
    "model", "stream", "stream_options", "temperature", "top_p", "stop", "seed", "max_tokens", "user", "n", "presence_penalty",
    "frequency_penalty", "logit_bias", "ignore_eos", "return_token_ids", "logprobs",
}  # fmt: skip
"""What both endpoints take. `user` names somebody and changes nothing; the penalties and `n` only with the value that changes nothing."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "echo": (False,), "suffix": ("",),
    "parallel_tool_calls": (True,), "store": (False,), "service_tier": ("auto", "default"), "modalities": (["text"],),
}  # fmt: skip
"""Fields that are not supported, and the values with which they ask for nothing."""


@dataclass(frozen=True)
class Sampling:
    """What both endpoints ask of the sampler and of the stream."""

    temperature: float
    top_p: float
    seed: int
    stop: list[str]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool


def check_names(body: Mapping[str, Any], known: set[str]) -> None:
    """Every field is known, and asks for something that is there. Raises ApiError 400."""
    for name, value in body.items():
        if name in NEUTRAL and value is not None and not any(value == v and type(value) in (type(v), float) for v in NEUTRAL[name]):
            raise bad(name, f"not supported; leave it out, or give {NEUTRAL[name][0]!r}", "unsupported_parameter")
        if name not in known and name not in NEUTRAL:
            shown = name[:100]
            raise bad(shown, "no such field, or not supported", "unknown_parameter")


def sampling(body: Mapping[str, Any]) -> Sampling:
    """Raises ApiError 400 with the field's name."""
    stream = boolean(body, "stream")
    include_usage = False
    options = body.get("stream_options")
    if options is not None:
        if not stream:
            raise bad("stream_options", "only with stream: true")
        if not isinstance(options, dict) or not set(options) <= {"include_usage", "include_obfuscation"}:
            raise bad("stream_options", "expected an object with include_usage")
        if options.get("include_obfuscation") not in (None, False):
            raise bad("stream_options.include_obfuscation", "not supported; leave it out, or give False", "unsupported_parameter")
        include_usage = boolean(options, "include_usage", "stream_options.include_usage")
    seed = integer(body, "seed", 0, MAX_SEED - 1)
    return Sampling(
        temperature=number(body, "temperature", 0.0, 2.0, 1.0),
        top_p=number(body, "top_p", 0.0, 1.0, 1.0, above=True),
        seed=secrets.randbelow(MAX_SEED) if seed is None else seed,
        stop=stops(body),
        ignore_eos=boolean(body, "ignore_eos"),
        stream=stream,
        include_usage=include_usage,
        return_token_ids=boolean(body, "return_token_ids"),
    )


def model(body: Mapping[str, Any], served: str) -> None:
    """Raises ApiError: 400 without a model, 404 for another one."""
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise bad("model", f"expected the name of a model, found {_shown(name)}")
    if name != served:
        raise ApiError(404, f"model {name[:100]!r} does not exist; this server has {served!r}", "model", "model_not_found")


def boolean(body: Mapping[str, Any], name: str, path: str = "") -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad(path or name, f"expected true or false, found {_shown(value)}")
    return bool(value)


def integer(body: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    """None where the field is absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not least <= value <= most:
        raise bad(name, f"expected an integer from {least} to {most}, found {_shown(value)}")
    return value


def number(body: Mapping[str, Any], name: str, least: float, most: float, default: float, above: bool = False) -> float:
    value = body.get(name)
    if value is None:
        return default
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most and math.isfinite(value)
    if not fits or (above and value == least):
        raise bad(name, f"expected a number {'above' if above else 'from'} {least:g} {'and at most' if above else 'to'} {most:g}, "
                        f"found {_shown(value)}")  # fmt: skip
    return float(value)


def stops(body: Mapping[str, Any]) -> list[str]:
    value = body.get("stop")
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return []
    if not isinstance(texts, list) or len(texts) > MAX_STOPS or not all(isinstance(text, str) and text for text in texts):
        raise bad("stop", f"expected a text, or up to {MAX_STOPS} texts, none of them empty, found {_shown(value)}")
    return texts


def check_context(prompt_tokens: int, new_tokens: int, max_context: int, param: str) -> None:
    """Raises ApiError 400 with every number, before any work."""
    if prompt_tokens + new_tokens > max_context:
        raise ApiError(
            400,
            f"this server's context has {max_context} tokens; {prompt_tokens} of the prompt and {new_tokens} to generate make "
            f"{prompt_tokens + new_tokens}; shorten the prompt or lower max_tokens",
            param,
            "context_length_exceeded",
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
