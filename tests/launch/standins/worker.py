"""A worker without experts: writes its progress record, and does what the faults of its spec say.

{"rank": 0, "do": "exit", "code": 4, "words": "..."} at the start; "stubborn" ignores SIGTERM; "calls" serves calls.
"""

import logging
import mmap
import os
import select
import signal
import sys
import time

from evrun.expert_worker.spec import WorkerSpec
from evrun.expert_worker.wire import child, heartbeat, logs


def main(path):
    spec = WorkerSpec.load(path)
    child.die_with_parent(spec.launcher_pid)
    logs.setup("worker", spec.rank, spec.incarnation, spec.log_level)
    logging.info("hello")
    todo = [f["do"] for f in spec.faults]
    try:
        os.write(spec.call_fd, b"x")
    except OSError:
        pass
    else:
        raise AssertionError("the call memory can be written to")
    if "exit" in todo:
        sys.stderr.write(spec.faults[0]["words"] + "\n")
        return spec.faults[0]["code"]
    if "stubborn" in todo:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    memory = mmap.mmap(spec.reply_fd, heartbeat.RECORD_BYTES)
    heart = heartbeat.Heart(memoryview(memory), spec.incarnation, os.getpid())
    heart.enter("ready")
    while not select.select([spec.lifeline_fd], [], [], 0.02)[0]:
        if "calls" in todo:
            heart.answered()
            heart.begin(3, heart.calls)
        heart.beat()
        time.sleep(0.01)
    return 0


sys.exit(main(sys.argv[1]))
