"""One admitted request from its place in the queue to its last word, whoever reads the answer and how fast."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from evrun.expert_worker.wire.requests import Finished, Prefill, Queued, Refused, Started, Token
from evrun.launch.http import errors
from evrun.launch.http.answer import Answer
from evrun.launch.http.ask import Ask, LostError
from evrun.launch.http.errors import ApiError
from evrun.launch.http.gate import Gate
from evrun.launch.http.metrics import Metrics
from evrun.launch.http.outbox import LaggingError, Outbox

Opener = Callable[[Any], Awaitable[Ask]]
DONE = b"data: [DONE]\n\n"
log = logging.getLogger("exchange")


class Exchange:
    """`admit`, then `run` to the end; `abandon` at any time. The place in the gate is free as soon as the model is."""

    def __init__(self, answer: Answer, gate: Gate, open_ask: Opener, metrics: Metrics) -> None:
        self.answer, self.outbox = answer, Outbox()
        self.error: ApiError | None = None
        """Why it did not come to its end."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called when the coordinator vanishes."""
        self.progress = "waiting"
        """For the comment lines of a stream."""
        self.lagging = asyncio.Event()
        """The client reads too slowly; its request was cancelled."""
        self._gate, self._open, self._metrics = gate, open_ask, metrics
        self._ask: Ask | None = None
        self._first: Any = None
        self._started = False
        self._began_s = time.monotonic()
        self._token_s: tuple[float, float, int] | None = None
        """Times of the first and the newest token, and how many there are."""

    async def admit(self) -> None:
        """Take a place and hand the request over. Raises ApiError: 429, 503, and what the coordinator refuses."""
        self._gate.enter()
        try:
            async with self._gate.order:
                self._ask = await self._open(self.answer.message)
                self._first = await self._ask.next()
            if isinstance(self._first, Refused):
                raise errors.of_refusal(self._first)
        except LostError as error:
            self._leave()
            self.on_lost()
            raise errors.unavailable(str(error), "coordinator_lost") from None
        except BaseException:
            self._leave()
            raise

    async def run(self) -> None:
        """Follow the request to its end; `error` and the outbox tell the rest. Cancelling this cancels the request."""
        assert self._ask is not None
        try:
            await self._follow(self._ask)
        except LostError as error:
            if self.error is None:
                self.on_lost()
                self.error = errors.unavailable(str(error), "coordinator_lost")
        except LaggingError as error:
            log.warning("a request was cancelled: %s", error)
            self.error = ApiError(500, str(error))
            self.lagging.set()
        except Exception as error:  # a fault of ours ends this request, not the server
            log.exception("a request failed in the front end")
            self.error = ApiError(500, f"{type(error).__name__} in the front end; its log has it", None, "internal_error")
        finally:
            self._leave()
            self._end()

    def abandon(self, error: ApiError) -> None:
        """End it early, with this as its error."""
        self.error = self.error or error
        if self._ask is not None:
            self._ask.close()

    async def _follow(self, ask: Ask) -> None:
        said = self._first
        while True:
            if isinstance(said, Queued):
                self.progress = f"queued, {said.ahead} ahead"
            elif isinstance(said, Started):
                self._begin()
                self._emit(self.answer.start(said))
            elif isinstance(said, Prefill):
                self.progress = f"prefill {said.done} of {said.total} tokens"
            elif isinstance(said, Token):
                self._clock()
                self._emit(self.answer.take(said))
                if self.answer.complete:
                    self._emit(self.answer.finish(None))
                    return
            elif isinstance(said, Finished):
                if said.error is not None:
                    self.error = self.error or errors.of_failure(said)
                else:
                    self._emit(self.answer.finish(said))
                return
            elif isinstance(said, Refused):
                self.error = errors.of_refusal(said)
                return
            said = await ask.next()

    def _begin(self) -> None:
        self._started = True
        self._gate.running += 1
        self.progress = "started"
        self._metrics.prompt_tokens.inc(self.answer.prompt_tokens)

    def _clock(self) -> None:
        now_s = time.monotonic()
        if self._token_s is None:
            self._metrics.first_token_s.observe(now_s - self._began_s)
            self._token_s = now_s, now_s, 1
        else:
            first_s, _, count = self._token_s
            self._token_s = first_s, now_s, count + 1
        self._metrics.generated_tokens.inc()

    def _emit(self, chunks: list[str]) -> None:
        if self.answer.stream and chunks:
            self.outbox.put("".join(f"data: {chunk}\n\n" for chunk in chunks).encode())

    def _leave(self) -> None:
        if self._ask is not None:
            self._ask.close()
        if self._started:
            self._started = False
            self._gate.running -= 1
        self._gate.leave()

    def _end(self) -> None:
        if self._token_s is not None and self._token_s[2] > 1:
            first_s, last_s, count = self._token_s
            self._metrics.token_s.observe((last_s - first_s) / (count - 1))
        if self.answer.stream and not self.lagging.is_set():
            tail = DONE if self.error is None else f"data: {json.dumps(self.error.body(), ensure_ascii=False)}\n\n".encode() + DONE
            try:
                self.outbox.put(tail)
            except LaggingError:
                self.lagging.set()
        self.outbox.close()
