"""The HTTP process: `python -m evrun.launch.http SPEC`. Serves until SIGTERM, then drains and ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from evrun.expert_worker.wire import child, logs
from evrun.launch.http.app import FrontEndApp
from evrun.launch.http.protocol import MAX_HEAD_BYTES, GuardedProtocol
from evrun.launch.http.spec import HttpSpec

KEEP_ALIVE_S = 30
CLOSE_WITHIN_S = 1
log = logging.getLogger("http")


class Server(uvicorn.Server):
    """Leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(spec: HttpSpec) -> None:
    front = FrontEndApp(spec)
    config = uvicorn.Config(
        front.asgi,
        http=GuardedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_WITHIN_S,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )
    server = Server(config)
    asked_to_end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked_to_end.set)
    watch = asyncio.create_task(front.watch.run())
    serving = asyncio.create_task(server.serve([socket.socket(fileno=spec.listen_fd)]))
    ending = asyncio.create_task(asked_to_end.wait())
    log.info("serving; at most %d wait", spec.max_queue)
    await asyncio.wait({watch, serving, ending}, return_when=asyncio.FIRST_COMPLETED)
    if watch.done():
        watch.result()
    await front.drain(spec.drain_s)
    server.should_exit = True
    await serving
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    front.watch.close()
    log.info("end")


def main(spec_path: str) -> int:
    os.umask(0o077)
    spec = HttpSpec.load(spec_path)
    child.die_with_parent(spec.launcher_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's business
    logs.setup("http", None, spec.incarnation, spec.log_level)
    asyncio.run(serve(spec))
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    logging.shutdown()
    os._exit(code)  # a thread may still wait for a coordinator that does not answer
