"""The routes: who may ask, what is asked, and the answer or the error, in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from evrun.launch.http import body, replies
from evrun.launch.http.answer import Answer
from evrun.launch.http.ask import Ask
from evrun.launch.http.chat import Chat
from evrun.launch.http.completions import Completion
from evrun.launch.http.config import is_loopback
from evrun.launch.http.errors import ApiError, unavailable
from evrun.launch.http.exchange import Exchange
from evrun.launch.http.gate import Gate
from evrun.launch.http.health import Health, judge
from evrun.launch.http.metrics import CONTENT_TYPE, Metrics
from evrun.launch.http.spec import HttpSpec
from evrun.launch.http.vocabulary import Vocabulary
from evrun.launch.http.watch import Watch

PARSERS = 2
CONNECTORS = 4
OPEN_PATHS = ("/health",)
"""What a probe without a key may ask."""
Endpoint = Callable[[Request], Awaitable[Response]]
log = logging.getLogger("http")


class FrontEndApp:
    """State of the process, and its endpoints. `asgi` is what the server runs."""

    def __init__(self, spec: HttpSpec) -> None:
        self._spec = spec
        self._vocabulary = Vocabulary(Path(spec.checkpoint), spec.vocab_size, spec.bos_token_id)
        self.watch = Watch(spec.control_address, spec.secret)
        self.gate = Gate(spec.max_queue)
        self._metrics = Metrics()
        self._metrics.watch(self.gate, self.watch, spec.stall_s, spec.stuck_s)
        self._parsers = ThreadPoolExecutor(PARSERS, "parse")
        self._connectors = ThreadPoolExecutor(CONNECTORS, "connect")
        self._exchanges: set[Exchange] = set()
        self._model = {"id": spec.model_name, "object": "model", "created": 0, "owned_by": "evrun", "max_model_len": spec.max_context}
        get, post = ["GET"], ["POST"]
        self.asgi = Starlette(
            routes=[
                Route("/v1/completions", self._guarded(self._completions), methods=post),
                Route("/v1/chat/completions", self._guarded(self._chat), methods=post),
                Route("/v1/models", self._guarded(self._models), methods=get),
                Route("/v1/models/{name:path}", self._guarded(self._one_model), methods=get),
                Route("/v1/status", self._guarded(self._status), methods=get),
                Route("/metrics", self._guarded(self._show_metrics), methods=get),
                Route("/health", self._guarded(self._health), methods=get),
            ],
            exception_handlers={HTTPException: self._no_route},  # type: ignore[dict-item]
        )

    async def drain(self, within_s: float) -> None:
        """No new request from now on; those that run may go on for so long, then they end with an error."""
        self.watch.draining = True
        deadline = asyncio.get_running_loop().time() + within_s
        while self._exchanges and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        for exchange in list(self._exchanges):
            exchange.abandon(unavailable("the server is stopping", "stopping"))

    # ---- around every endpoint ----

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint behind the key, its errors as responses, its responses counted."""

        async def guarded(request: Request) -> Response:
            path = request.scope["route"].path
            try:
                if path not in OPEN_PATHS:
                    self._check_client(request)
                response = await endpoint(request)
            except ApiError as error:
                response = replies.error_response(error)
            except (replies.GoneError, ClientDisconnect):
                response = Response(status_code=replies.GONE)  # for the count; nobody reads it
            except Exception:
                log.exception("%s failed", path)
                response = replies.error_response(ApiError(500, "the front end failed; its log has it", None, "internal_error"))
            if not isinstance(response, replies.EventStream):
                self._count(path, response.status_code)
            response.headers["x-request-id"] = secrets.token_hex(8)
            return response

        return guarded

    def _check_client(self, request: Request) -> None:
        """Raises ApiError 401 or 403."""
        if self._spec.key_sha256:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            given = hashlib.sha256(key.strip().encode()).hexdigest() if scheme.lower() == "bearer" else ""
            if not hmac.compare_digest(given, self._spec.key_sha256):
                raise ApiError(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY", None, "invalid_api_key")
        elif is_loopback(self._spec.host) and not is_loopback(_host_of(request.headers.get("host", ""))):
            # Without a key, a name that somebody points at this address must not let web pages in.
            raise ApiError(403, "without a key only requests to localhost are answered; found another Host", None, "host_not_allowed")

    def _count(self, path: str, status: int) -> None:
        self._metrics.responses.labels(path, str(status)).inc()

    async def _no_route(self, request: Request, error: HTTPException) -> Response:
        self._count("other", error.status_code)
        path = request.url.path[:200]
        if error.status_code == 405:
            found = ApiError(405, f"{request.method} is not for {path}", None, "method_not_allowed")
        else:
            found = ApiError(error.status_code, f"there is no {path}", None, "not_found")
        response = replies.error_response(found)
        if error.headers:
            response.headers.update(error.headers)
        return response

    # ---- generation ----

    async def _completions(self, request: Request) -> Response:
        return await self._generate(
            request, lambda fields: Completion(fields, self._spec.model_name, self._vocabulary, self._spec.max_context)
        )

    async def _chat(self, request: Request) -> Response:
        spec = self._spec
        return await self._generate(
            request, lambda fields: Chat(fields, spec.model_name, self._vocabulary, spec.max_context, spec.eos_token_id)
        )

    async def _generate(self, request: Request, parse: Callable[[Mapping[str, Any]], Answer]) -> Response:
        fields = await body.read(request.stream(), request.headers.get("content-length"), request.headers.get("content-type", ""))
        answer = await asyncio.get_running_loop().run_in_executor(self._parsers, parse, fields)
        health = await self._judge()
        if not health.serves:
            raise unavailable(health.message, health.code)
        exchange = Exchange(answer, self.gate, self._open, self._metrics)
        exchange.on_lost = self.watch.coordinator_lost
        await replies.unless_gone(exchange.admit(), request.receive)
        self._exchanges.add(exchange)
        path = request.scope["route"].path
        if answer.stream:
            return replies.EventStream(exchange, lambda status: self._over(exchange, path, status))
        try:
            return await replies.whole(exchange, request.receive)
        finally:
            self._exchanges.discard(exchange)

    def _over(self, exchange: Exchange, path: str, status: int) -> None:
        self._exchanges.discard(exchange)
        self._count(path, status)

    async def _open(self, message: Any) -> Ask:
        return await Ask.open(self._connectors, self._spec.requests_path, self._spec.secret, message)

    # ---- what there is, and how it is ----

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model]})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._spec.model_name:
            raise ApiError(
                404, f"model {name[:100]!r} does not exist; this server has {self._spec.model_name!r}", "model", "model_not_found"
            )
        return JSONResponse(self._model)

    async def _judge(self) -> Health:
        """Nobody is turned away for what an old look says: the run may have become ready since."""
        health = judge(self.watch.seen(), self._spec.stall_s, self._spec.stuck_s)
        if health.serves:
            return health
        await self.watch.fresh(0.0)
        return judge(self.watch.seen(), self._spec.stall_s, self._spec.stuck_s)

    async def _health(self, request: Request) -> Response:
        await self.watch.fresh()
        health = await self._judge()
        return JSONResponse(health.body, health.status, {} if health.serves else {"Retry-After": "2"})

    async def _status(self, request: Request) -> Response:
        await self.watch.fresh()
        if self.watch.look is None:
            raise unavailable("the launcher does not answer", "unknown")
        return Response(json.dumps(self.watch.look["ps"]), media_type="application/json")

    async def _show_metrics(self, request: Request) -> Response:
        await self.watch.fresh()
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE})


def _host_of(header: str) -> str:
    """`localhost` of `localhost:8000`, `::1` of `[::1]:8000`."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header
