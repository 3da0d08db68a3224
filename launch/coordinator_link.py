"""The launcher's end of the coordinator's supervision socket: nothing that is told gets lost, nothing ever blocks."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import deque
from typing import Any

from evrun.expert_worker.wire import supervision
from evrun.expert_worker.wire.codec import CodecError

log = logging.getLogger("coordinator-link")


class CoordinatorLink:
    """Lives as long as one incarnation of the coordinator; after its end `fd` is -1 and `tell` is without effect."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.fd = sock.fileno()
        self._outbox: deque[tuple[Any, int]] = deque()
        """(message, descriptor to pass or -1) that the coordinator has not taken yet."""

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox)

    def tell(self, message: Any, fd: int = -1) -> None:
        """Send now or, when the socket is full, with a later `flush`, in order. Takes over `fd`."""
        if self.fd < 0:
            _close(fd)
            return
        self._outbox.append((message, fd))
        self.flush()

    def flush(self) -> None:
        try:
            while self._outbox:
                message, fd = self._outbox[0]
                if not supervision.send(self._socket, message, (fd,) if fd >= 0 else ()):
                    return
                self._outbox.popleft()
                _close(fd)
        except OSError:
            self.close()  # its pidfd tells the rest

    def receive(self) -> list[Any]:
        """Every message that has come. At the coordinator's end the link closes."""
        messages: list[Any] = []
        while self.fd >= 0:
            try:
                packet = supervision.receive(self._socket)
            except CodecError as error:
                log.warning("dropped a message of the coordinator: %s", error)
                continue
            except (EOFError, OSError):
                self.close()
                break
            if packet is None:
                break
            message, fds = packet
            for fd in fds:
                _close(fd)
            messages.append(message)
        return messages

    def close(self) -> None:
        self.fd = -1
        self._socket.close()
        while self._outbox:
            _close(self._outbox.popleft()[1])


def _close(fd: int) -> None:
    if fd >= 0:
        with contextlib.suppress(OSError):
            os.close(fd)
