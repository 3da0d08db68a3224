"""The coordinator process: `python -m evrun.coordinator SPEC`. Loads the dense tree, meets the workers, serves requests."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING

from evrun.coordinator import card, sums
from evrun.coordinator.spec import CoordinatorSpec
from evrun.expert_worker.wire import child

if TYPE_CHECKING:
    from evrun.coordinator.fleet import Fleet
    from evrun.expert_worker.wire.checkpoint.reader import Checkpoint

IDLE_S = 1.0


def main(spec_path: str) -> int:
    started = time.monotonic()
    os.umask(0o077)
    spec = CoordinatorSpec.load(spec_path)
    child.die_with_parent(spec.launcher_pid)
    child.pin(spec.cpus, spec.threads)
    card.pin(spec.device)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's business

    vectors = sums.steady() if spec.dtype == "float32" else None

    from evrun.coordinator.fleet import Fleet, ShutdownError
    from evrun.expert_worker.wire import logs
    from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
    from evrun.expert_worker.wire.errors import RUNNING, EvrunError

    logs.setup("coordinator", None, spec.incarnation, spec.log_level)
    log = logging.getLogger("coordinator")
    if vectors:
        log.info("float32: sums over %s vectors, as golden values were made with", vectors)
    fleet: Fleet | None = None
    try:
        checkpoint = Checkpoint.open(spec.checkpoint)
        fleet = Fleet(spec, checkpoint.config)
        _serve(spec, checkpoint, fleet, started)
    except ShutdownError as end:
        log.info("end: %s", end)
        return 0
    except EvrunError as error:
        return _fatal(fleet, error.exit_code, str(error))
    except MemoryError:
        return _fatal(fleet, 4, "out of memory in the coordinator")
    except Exception as error:  # a fault of ours: the log has it whole, the user one line
        if card.out_of_memory(error):
            return _fatal(fleet, 4, f"the dense tree does not fit {spec.device}; use --coordinator cpu, or a smaller --card-cache")
        log.error("%s", traceback.format_exc())
        return _fatal(fleet, RUNNING, f"the coordinator failed: {type(error).__name__}: {error}; see `evrun logs coordinator`")
    finally:
        if fleet:
            fleet.close()
    return 0


def _serve(spec: CoordinatorSpec, checkpoint: Checkpoint, fleet: Fleet, started: float) -> None:
    """Load, wait for the workers, then one request after the other. Ends by ShutdownError."""
    from evrun.coordinator.engine import Engine
    from evrun.coordinator.expert_client import ExpertClient
    from evrun.coordinator.load import Loading
    from evrun.coordinator.request_server import RequestServer
    from evrun.coordinator.status import StatusMaker
    from evrun.coordinator.text import Text

    requests = RequestServer(spec.requests_path, spec.secret, spec.max_queue)
    try:
        status = StatusMaker(spec, checkpoint.config, fleet, requests, started)
        fleet.status = status.make
        fleet.watch(requests.wake_fd, requests.hush)
        model = Loading(spec, checkpoint, fleet, status).model()
        while not fleet.settled():
            status.waiting_for_workers()
            fleet.pump(IDLE_S)
        status.loaded()
        engine = Engine(spec, model, Text(checkpoint.directory, checkpoint.config.bos_token_id), ExpertClient(spec, fleet), status)
        while True:
            job = requests.take()
            if job is None:
                status.idle()
                fleet.pump(IDLE_S)
                continue
            status.serving()
            engine.serve(job)
            requests.done()
    finally:
        requests.close("the coordinator ends")


def _fatal(fleet: Fleet | None, exit_code: int, error: str) -> int:
    logging.getLogger("coordinator").error("%s", error)
    if fleet:
        fleet.fatal(exit_code, error)
    return exit_code


if __name__ == "__main__":
    code = main(sys.argv[1])
    logging.shutdown()
    os._exit(code)  # everything is closed; taking torch down in order would only make `evrun stop` a second longer
