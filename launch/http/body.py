"""A request's body: read within limits, parsed as JSON that can be passed on. Whatever is wrong is one ApiError."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from evrun.launch.http.errors import ApiError

MAX_BYTES = 8 << 20
WITHIN_S = 60.0
MAX_DEPTH = 64
SHOWN = 200


async def read(chunks: AsyncIterator[bytes], declared: str | None, content_type: str) -> dict[str, Any]:
    """The JSON object of a body. `declared` is its Content-Length.

    Raises ApiError: 415 (not JSON by its type), 413 (too long), 408 (too slow), 400 (not a JSON object).
    """
    if content_type.partition(";")[0].strip().lower() != "application/json":
        # A web page of any site can send other types here without asking; this one makes a browser ask first.
        raise ApiError(415, f"Content-Type: expected application/json, found {content_type[:SHOWN]!r}", None, "unsupported_content_type")
    if declared is not None and declared.isdigit() and (len(declared) > 18 or int(declared) > MAX_BYTES):
        raise _too_long(declared[:20])
    try:
        data = await asyncio.wait_for(_collect(chunks), WITHIN_S)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not come within {WITHIN_S:g} s", None, "body_timeout") from None
    return parse(data)


async def _collect(chunks: AsyncIterator[bytes]) -> bytes:
    parts, size = [], 0
    async for chunk in chunks:
        size += len(chunk)
        if size > MAX_BYTES:
            raise _too_long(f"more than {MAX_BYTES}")
        parts.append(chunk)
    return b"".join(parts)


def _too_long(found: str) -> ApiError:
    return ApiError(413, f"the body may have {MAX_BYTES} bytes, found {found}", None, "body_too_long")


def parse(data: bytes) -> dict[str, Any]:
    """Raises ApiError 400: not UTF-8, not JSON (NaN and infinities are none), not an object, nested too deep, lone surrogates."""
    try:
        body = json.loads(data, parse_constant=_no_number)
    except RecursionError:
        raise ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:SHOWN]}", None, "invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, found {type(body).__name__}", None, "invalid_json")
    for name, value in body.items():
        _check(name, name, 0)
        _check(value, name, 1)
    return body


def _check(value: Any, path: str, depth: int) -> None:
    top = path.split(".")[0].split("[")[0][:SHOWN].encode(errors="replace").decode()
    if depth > MAX_DEPTH:
        raise ApiError(400, f"{top}: nested deeper than {MAX_DEPTH} levels", top)
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ApiError(400, f"{top}: a text with half of a surrogate pair is not Unicode", top) from None
    elif isinstance(value, float):
        if value in (float("inf"), float("-inf")):
            raise ApiError(400, f"{top}: a number that is too large", top)
    elif isinstance(value, list):
        if value and all(type(item) is int for item in value):
            return
        for item in value:
            _check(item, path, depth + 1)
    elif isinstance(value, dict):
        for name, item in value.items():
            _check(name, path, depth + 1)
            _check(item, path, depth + 1)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")
