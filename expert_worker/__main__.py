"""One worker process: `python -m evrun.expert_worker SPEC`. Pins itself, opens the rows, says ready, runs the loop."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time

from evrun.expert_worker.spec import WorkerSpec
from evrun.expert_worker.wire import child


def main(spec_path: str) -> int:
    started = time.monotonic()
    os.umask(0o077)
    spec = WorkerSpec.load(spec_path)
    child.die_with_parent(spec.launcher_pid)
    child.pin(spec.cpus, spec.threads)
    child.yield_wakeups()
    if spec.device != "cpu":  # before anything of CUDA is loaded: this process sees one card
        os.environ["CUDA_VISIBLE_DEVICES"] = spec.device.partition(":")[2]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's business

    from evrun.expert_worker.wire import logs
    from evrun.expert_worker.wire.errors import EvrunError

    logs.setup("worker", spec.rank, spec.incarnation, spec.log_level)
    log = logging.getLogger("worker")
    try:
        _serve(spec, started)
    except EOFError as error:
        log.error("%s", error)
        return 0
    except EvrunError as error:
        log.error("%s", error)
        return error.exit_code
    return 0


def _serve(spec: WorkerSpec, started: float) -> None:
    from evrun.expert_worker.lane import open_lane
    from evrun.expert_worker.loop import Loop
    from evrun.expert_worker.timeline import Part, Timeline
    from evrun.expert_worker.wire import messages
    from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
    from evrun.expert_worker.wire.heartbeat import Heart
    from evrun.expert_worker.wire.link import open_port
    from evrun.expert_worker.wire.slots import CallMemory, ReplyMemory, SlotLayout

    log = logging.getLogger("worker")
    checkpoint = Checkpoint.open(spec.checkpoint, identity=spec.shard_identity)
    config = checkpoint.config
    layout = SlotLayout.of(config, spec.world_size, spec.prefill_chunk, spec.dtype, spec.combine)
    calls = CallMemory(layout, spec.call_fd, writable=False)
    reply = ReplyMemory(layout, spec.reply_fd, writable=True)
    heart = Heart(reply.record, spec.incarnation, os.getpid())
    bells = spec.request_bell_fd, spec.reply_bell_fd
    cells = calls.cell(spec.rank), reply.cell
    who = spec.rank, spec.incarnation
    port = open_port(spec.transport, spec.hub_address, *who, spec.lifeline_fd, spec.run_id, *cells, bells, spec.world_size + 1)
    with contextlib.closing(port):
        port.announce(messages.Hello(spec.secret, spec.run_id, spec.rank, spec.incarnation, os.getpid()))
        lane = open_lane(spec, checkpoint, reply, heart.beat)
        load_s = time.monotonic() - started
        log.info("ready in %.2f s: %s, rung %s, %d thread(s) on cores %s", load_s, lane.backend, lane.rung, spec.threads, spec.cpus)
        heart.enter("ready")
        port.announce(messages.Ready(spec.rank, spec.incarnation, spec.device, lane.backend, lane.rung, spec.threads, load_s))
        timeline = Timeline() if spec.timeline else None
        if timeline:
            timeline.wrap([Part(lane, "compute", "compute"), *lane.parts()])
        Loop(spec, config.n_routed_experts, port, calls, reply, lane, heart).run()
        heart.enter("stopped")
        if timeline:
            timeline.write(spec.timeline)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
