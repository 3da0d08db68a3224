"""uvicorn's HTTP/1.1 protocol with deadlines: a connection that sends or takes nothing does not stay for ever."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from evrun.launch.http.errors import ApiError

HEAD_WITHIN_S = 30.0
"""From the first byte of a connection, or of its next request, to the end of the head; also the longest silence before it."""
TAKE_WITHIN_S = 60.0
"""Longest time for which a client may leave our output where it is."""
MAX_CONNECTIONS = 1000
MAX_HEAD_BYTES = 32 << 10


class GuardedProtocol(H11Protocol):
    """One connection."""

    head_within_s = HEAD_WITHIN_S
    take_within_s = TAKE_WITHIN_S
    max_connections = MAX_CONNECTIONS

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_timer: asyncio.TimerHandle | None = None
        self._take_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            error = ApiError(503, f"{self.max_connections} connections are open, which is the limit", None, "too_many_connections", 2)
            self._refuse(error, b"503 Service Unavailable")
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            _cancel(self._head_timer)
            self._head_timer = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg, None, "invalid_http"), b"400 Bad Request")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._take_timer = self._take_timer or self.loop.call_later(self.take_within_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._take_timer)
        self._take_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head_timer)
        self._head_timer = None
        _cancel(self._take_timer)
        self._take_timer = None
        super().connection_lost(exc)

    def _await_head(self) -> None:
        _cancel(self._head_timer)
        self._head_timer = self.loop.call_later(self.head_within_s, self._give_up)

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, error: ApiError, status: bytes) -> None:
        body = json.dumps(error.body()).encode()
        retry = b"retry-after: %d\r\n" % error.retry_after_s if error.retry_after_s is not None else b""
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%sconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body), retry) + body)
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
