"""Who may go on to the coordinator: one request runs, a bounded number waits, in the order in which they came."""

from __future__ import annotations

import asyncio

from evrun.launch.http.errors import queue_full


class Gate:
    """Places for 1 + max_queue requests. Belongs to the event loop."""

    def __init__(self, max_queue: int) -> None:
        self.max_queue = max_queue
        self.inside = 0
        """Requests that run or wait."""
        self.running = 0
        """Of these, the ones that the coordinator has begun."""
        self.order = asyncio.Lock()
        """Held while a request is handed over, so that the coordinator's queue has this order."""

    @property
    def waiting(self) -> int:
        return self.inside - self.running

    def enter(self) -> None:
        """Raises ApiError 429; otherwise `leave` must follow."""
        if self.inside > self.max_queue:
            raise queue_full(self.max_queue)
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1
