"""The coordinator's door for clients: one AF_UNIX connection per request, a FIFO of jobs for the engine.

Threads do the waiting (one reader and one writer per client), so that a slow or vanished client never holds the
engine: what the engine says goes into the job's queue, and end-of-file on the connection cancels the job. Framing,
length limit and the secret are those of `multiprocessing.connection`, of which only the byte calls are used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from evrun.expert_worker.wire.codec import MAX_BYTES, CodecError
from evrun.expert_worker.wire.errors import RUNNING, USAGE
from evrun.expert_worker.wire.requests import Cancel, Finished, Generate, Queued, Refused, codec

SEND_QUEUE = 4096
"""Messages a client may lag behind before its request is cancelled."""
REQUEST_WITHIN_S = 10.0
log = logging.getLogger("requests")


class Job:
    """One request, shared by the engine (main thread) and its client's threads."""

    def __init__(self, request: Generate) -> None:
        self.request = request
        self._outbox: queue.Queue[Any] = queue.Queue(SEND_QUEUE)
        self._cancelled = threading.Event()
        self.cancel_reason = ""

    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self, reason: str) -> None:
        self.cancel_reason = self.cancel_reason or reason
        self._cancelled.set()

    def say(self, message: Any) -> None:
        """To the client, without waiting. A client that does not read for SEND_QUEUE messages loses its request."""
        try:
            self._outbox.put_nowait(message)
        except queue.Full:
            self.cancel("the client does not read its answer")

    def write_to(self, connection: Connection) -> None:
        """Send what the engine says until the last message. Runs in the client's writer thread."""
        while True:
            message = self._outbox.get()
            try:
                connection.send_bytes(codec.encode(message))
            except (OSError, CodecError) as error:
                self.cancel(f"the client is gone ({error})")
                return
            if isinstance(message, Finished | Refused):
                return


class RequestServer:
    """Accepts clients and queues their jobs; the engine takes one at a time."""

    def __init__(self, path: str, secret: str, max_queue: int) -> None:
        self._listener = Listener(path, "AF_UNIX", backlog=64)
        self._secret = secret.encode()
        os.chmod(path, 0o600)
        self._max_queue = max_queue
        self._lock = threading.Lock()
        self._waiting: list[Job] = []
        self._running: Job | None = None
        self._closed = False
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Rung when a job came."""
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def waiting(self) -> int:
        return sum(not job.cancelled() for job in list(self._waiting))

    def hush(self) -> None:
        """Take the rings of `wake_fd`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)

    def take(self) -> Job | None:
        """The next job that is still wanted; it runs until `done`."""
        with self._lock:
            while self._waiting:
                job = self._waiting.pop(0)
                if not job.cancelled():
                    self._running = job
                    return job
        return None

    def done(self) -> None:
        with self._lock:
            self._running = None

    def close(self, reason: str) -> None:
        """No more clients; jobs that wait are refused."""
        self._closed = True
        with self._lock:
            refused, self._waiting = self._waiting, []
        for job in refused:
            job.say(Refused(RUNNING, f"the run ends: {reason}"))
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    log.warning("a client was turned away: %s", error)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="client", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection:
            request = self._hear(connection)
            if request is None:
                return
            job = Job(request)
            writer = threading.Thread(target=job.write_to, args=(connection,), name="writer", daemon=True)
            writer.start()
            self._queue(job)
            while writer.is_alive():
                try:
                    if connection.poll(0.1) and isinstance(codec.decode(connection.recv_bytes(MAX_BYTES)), Cancel):
                        job.cancel("cancelled by the client")
                except (EOFError, OSError, CodecError):
                    job.cancel("the client is gone")
                    break
            writer.join(1.0)

    def _hear(self, connection: Connection) -> Generate | None:
        """The client's request, once it has shown that it knows the secret. None: turned away, and the log says why."""
        try:
            deliver_challenge(connection, self._secret)
            answer_challenge(connection, self._secret)
            request = codec.decode(connection.recv_bytes(MAX_BYTES)) if connection.poll(REQUEST_WITHIN_S) else None
        except (AuthenticationError, EOFError, OSError, CodecError) as error:
            log.warning("a client was turned away: %s", str(error) or type(error).__name__)
            return None
        if not isinstance(request, Generate):
            log.warning("a client was turned away: it sent no request")
            return None
        return request

    def _queue(self, job: Job) -> None:
        with self._lock:
            self._waiting = [waiting for waiting in self._waiting if not waiting.cancelled()]  # the gone hold no place
            if self._closed:
                job.say(Refused(RUNNING, "the run ends"))
            elif len(self._waiting) >= self._max_queue:
                said = f"{self._max_queue} requests are waiting already, which is the limit; try again later"
                job.say(Refused(USAGE, said, queue_full=True))
            else:
                job.say(Queued(len(self._waiting) + (self._running is not None)))
                self._waiting.append(job)
        os.eventfd_write(self.wake_fd, 1)
