"""The launcher's side of the front end: the listening socket, made before anything is started, and the process's spec."""

from __future__ import annotations

import os
import socket
from typing import Any

from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.errors import UsageError
from evrun.launch.http.config import ServeConfig
from evrun.launch.http.spec import HttpSpec
from evrun.launch.plan import Plan, Wiring

BACKLOG = 1024
DRAIN_S = 5.0
"""From SIGTERM to the end of requests that still run; `evrun stop` waits for longer."""
STALL_MARGIN_S = 2.0
"""An idle worker shows progress once a second."""


class FrontEnd:
    """Listens; use as a context manager. Raises UsageError where the address cannot be had."""

    def __init__(self, config: ServeConfig, model: ModelConfig) -> None:
        self.config, self._model = config, model
        self._socket = _listen(config.host, config.port)
        self.drain_s = DRAIN_S

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    @property
    def url(self) -> str:
        """`http://127.0.0.1:8000`."""
        port = self._socket.getsockname()[1]
        return f"http://[{self.config.host}]:{port}" if ":" in self.config.host else f"http://{self.config.host}:{port}"

    def spec(self, plan: Plan, wiring: Wiring, incarnation: int) -> HttpSpec:
        config, run = self.config, plan.config
        return HttpSpec(
            run_id=wiring.run_id,
            name=run.name,
            secret=wiring.secret,
            incarnation=incarnation,
            control_address=wiring.hub_address.replace("/hub-", "/control-"),
            requests_path=wiring.requests_path,
            listen_fd=self.fd,
            host=config.host,
            launcher_pid=wiring.launcher_pid,
            checkpoint=run.checkpoint,
            model_name=config.served_model_name,
            max_context=plan.max_context,
            vocab_size=self._model.vocab_size,
            bos_token_id=self._model.bos_token_id,
            eos_token_id=self._model.eos_token_id,
            max_queue=config.max_queue,
            key_sha256=config.key_sha256,
            stall_s=run.stall_timeout + STALL_MARGIN_S,
            stuck_s=run.kill_timeout,
            drain_s=self.drain_s,
            log_level=run.log_level,
        )

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> FrontEnd:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"--host {host}: no address to listen at: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UsageError(f"--host {host} --port {port}: cannot listen there: {reason}; choose another --port, or 0 for any") from None
    return sock
