"""The run as its launcher tells it, asked for again and again: what /health, /metrics and /v1/status are made from."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

import zmq
import zmq.asyncio

from evrun.expert_worker.wire.codec import CodecError
from evrun.launch import control
from evrun.launch.http.health import Seen

EVERY_S = 0.5
FRESH_S = 0.1
ANSWER_WITHIN_S = 2.0
LOST_FOR_S = 5.0
"""How long a broken connection speaks against a coordinator that the launcher has not seen die."""
log = logging.getLogger("watch")


class Watch:
    """Belongs to the event loop. `run` is its task."""

    def __init__(self, address: str, secret: str) -> None:
        self._address, self._secret = address, secret.encode()
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._lock = asyncio.Lock()
        self.look: dict[str, Any] | None = None
        self._look_at_s = 0.0
        self._asked_at_s = 0.0
        """When the newest question that is over was put, answered or not."""
        self._calls: Any = None
        self._layer_at_s: float | None = None
        self._lost: tuple[int, float] | None = None
        """(incarnation, when) of the coordinator that was lost."""
        self.draining = False

    async def run(self) -> None:
        while True:
            await self.fresh()
            await asyncio.sleep(EVERY_S)

    async def fresh(self, age_s: float = FRESH_S) -> None:
        """See to it that the launcher was asked `age_s` before this call or later; what is known stays when it does not answer."""
        since_s = time.monotonic() - age_s
        async with self._lock:
            if self._asked_at_s > since_s:
                return
            asked_at_s = time.monotonic()
            try:
                answer = await asyncio.wait_for(self._ask(), ANSWER_WITHIN_S)
                look = json.loads(answer.text)
            except (asyncio.TimeoutError, CodecError, zmq.ZMQError, ValueError, AttributeError) as error:
                log.warning("the launcher did not answer: %s", str(error) or f"nothing within {ANSWER_WITHIN_S:g} s")
                self.close_socket()  # an answer that comes late must not be taken for a newer one
                return
            finally:
                self._asked_at_s = asked_at_s
            self._take(look, time.monotonic())

    def coordinator_lost(self) -> None:
        """A connection to it broke. Known here before its process is reaped."""
        if self.look is not None:
            self._lost = self.look["ps"]["processes"][0]["incarnation"], time.monotonic()

    def seen(self) -> Seen:
        now_s = time.monotonic()
        lost = False
        if self._lost is not None and self.look is not None:
            incarnation, at_s = self._lost
            lost = self.look["ps"]["processes"][0]["incarnation"] == incarnation and now_s - at_s < LOST_FOR_S
        layer_age_s = None if self._layer_at_s is None else now_s - self._layer_at_s
        return Seen(self.look, now_s - self._look_at_s, layer_age_s, self.draining, lost)

    def close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None

    def close(self) -> None:
        self.close_socket()
        self._context.term()

    async def _ask(self) -> Any:
        if self._socket is None:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.connect(self._address)
        await self._socket.send_multipart([self._secret, control.codec.encode(control.Look())])
        return control.codec.decode(await self._socket.recv())

    def _take(self, look: dict[str, Any], now_s: float) -> None:
        if self._calls is not None and look["calls"] != self._calls and any(calls for _, calls in look["calls"]):
            self._layer_at_s = now_s
        self.look, self._look_at_s, self._calls = look, now_s, look["calls"]
