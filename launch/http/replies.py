"""An exchange's answer on its way to the client: as one JSON object, or as server-sent events. Both end with the client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from evrun.launch.http.errors import ApiError
from evrun.launch.http.exchange import Exchange

COMMENT_EVERY_S = 3.0
"""A stream in which nothing else comes gets a comment line, so that nobody between takes it for dead."""
EVENT_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
GONE = 499
"""Status of a request whose client went away; nobody is there to see it."""


class GoneError(Exception):
    """The client closed its connection."""


async def disconnected(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(work: Awaitable[None], receive: Receive) -> None:
    """Do the work while the client is there. Raises GoneError, and what the work raises; the work is cancelled then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise GoneError
        task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def whole(exchange: Exchange, receive: Receive) -> Response:
    """Raises ApiError, GoneError."""
    await unless_gone(exchange.run(), receive)
    if exchange.error is not None:
        raise exchange.error
    return JSONResponse(exchange.answer.whole())


class EventStream(Response):
    """Headers at once, then events; ends when the answer does, or with the client."""

    def __init__(self, exchange: Exchange, count: Callable[[int], None]) -> None:
        super().__init__(headers=EVENT_HEADERS)
        del self.headers["content-length"]
        self._exchange, self._count = exchange, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = self._exchange
        tasks = [
            asyncio.ensure_future(each) for each in (exchange.run(), self._write(send), disconnected(receive), exchange.lagging.wait())
        ]
        status = self.status_code
        try:
            _running, writer, *ends = tasks
            await asyncio.wait({writer, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
            else:
                status = GONE
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._count(exchange.error.status if exchange.error is not None and status != GONE else status)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while (data := await self._exchange.outbox.take(COMMENT_EVERY_S)) is not None:
            body = data or f": {self._exchange.progress}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def error_response(error: ApiError) -> Response:
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s is not None else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)
