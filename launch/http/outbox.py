"""Bytes between the coordinator's pace and a client's: bounded, so that neither waits for the other."""

from __future__ import annotations

import asyncio

MAX_BYTES = 1 << 20


class LaggingError(Exception):
    """The client takes its answer too slowly."""


class Outbox:
    """One writer, one reader, one event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0
        self._closed = False
        self._stirred = asyncio.Event()

    def put(self, data: bytes) -> None:
        """Without waiting. Raises LaggingError when more than `max_bytes` would wait."""
        if self._size + len(data) > self._max_bytes and self._parts:
            raise LaggingError(f"more than {self._max_bytes} bytes of its answer wait for the client")
        self._parts.append(data)
        self._size += len(data)
        self._stirred.set()

    def close(self) -> None:
        """Nothing more comes."""
        self._closed = True
        self._stirred.set()

    async def take(self, within_s: float) -> bytes | None:
        """Everything that waits; empty when nothing came within `within_s`, None at the end."""
        if not self._parts and not self._closed:
            self._stirred.clear()
            try:
                await asyncio.wait_for(self._stirred.wait(), within_s)
            except asyncio.TimeoutError:
                return b""
        data, self._parts, self._size = b"".join(self._parts), [], 0
        return data or (None if self._closed else b"")
