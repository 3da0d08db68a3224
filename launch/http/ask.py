"""One request on its way through the coordinator, seen from an event loop.

The handshake of `multiprocessing.connection` blocks and runs in a thread; what follows are its frames (a length of four
bytes, big-endian, then a message of `wire.requests`) read by the loop. Closing cancels the request.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from concurrent.futures import Executor
from multiprocessing.connection import Connection
from typing import Any

from evrun.expert_worker.wire.codec import MAX_BYTES, CodecError
from evrun.expert_worker.wire.errors import RunError
from evrun.expert_worker.wire.requests import Generate, codec
from evrun.launch import client

LENGTH = struct.Struct("!i")


class LostError(Exception):
    """The coordinator is gone, cannot be reached, or talks nonsense."""


class Ask:
    """An open connection with the request sent; `next` gives what the coordinator says, in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, executor: Executor, path: str, secret: str, message: Generate) -> Ask:
        """Raises LostError."""
        work = asyncio.get_running_loop().run_in_executor(executor, client.connect, path, secret)
        try:
            connection = await asyncio.shield(work)
        except RunError as error:
            raise LostError(str(error)) from None
        except asyncio.CancelledError:
            work.add_done_callback(_close_late)
            raise
        sock = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()
        sock.setblocking(False)
        try:
            reader, writer = await asyncio.open_unix_connection(sock=sock)
        except BaseException:
            sock.close()
            raise
        data = codec.encode(message)
        writer.write(LENGTH.pack(len(data)) + data)
        return cls(reader, writer)

    async def next(self) -> Any:
        """Raises LostError."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if not 0 < length <= MAX_BYTES:
                raise CodecError(f"a message of {length} bytes")
            return codec.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError, CodecError) as error:
            said = str(error) if isinstance(error, CodecError) else "it is gone"
            raise LostError(f"the coordinator was lost during the request: {said}") from None

    def close(self) -> None:
        """At once, whatever is unsent; the coordinator takes it as a cancel."""
        self._writer.transport.abort()


def _close_late(work: asyncio.Future[Connection]) -> None:
    """Nobody waits for this connection any more."""
    if not work.cancelled() and work.exception() is None:
        work.result().close()
