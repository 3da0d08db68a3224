"""A coordinator without a model: speaks supervision and the request protocol, and echoes prompt ids.

Scripted by faults of its spec: {"rank": "coordinator", "do": "exit", "code": 3, "words": "..."} at the start, "fatal",
"silent" (no status, deaf to Shutdown), "slow" (never ready), "kill-worker" (asks for rank 0's end once it is ready).
"""

import mmap
import os
import select
import socket
import sys
import threading
import time
from multiprocessing.connection import Listener

from evrun.coordinator.spec import CoordinatorSpec
from evrun.expert_worker.wire import child, heartbeat, logs, requests, supervision


class Coordinator:
    def __init__(self, spec):
        self.spec = spec
        self.sock = socket.socket(fileno=spec.supervision_fd)
        self.started = {}
        self.gone = {}
        self.maps = [mmap.mmap(fd, heartbeat.RECORD_BYTES, mmap.MAP_SHARED, mmap.PROT_READ) for fd in spec.reply_fds]
        self.running = 0
        self.listener = Listener(spec.requests_path, "AF_UNIX", authkey=spec.secret.encode())
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        while True:
            connection = self.listener.accept()
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        with connection:
            asked = requests.codec.decode(connection.recv_bytes())
            ids = asked.prompt_ids or [ord(c) for c in asked.prompt]
            self.running += 1
            say = lambda message: connection.send_bytes(requests.codec.encode(message))  # noqa: E731
            say(requests.Queued(0))
            say(requests.Started(ids, [str(i) for i in ids], "routed experts: stand-in"))
            given = []
            for n in range(asked.max_new_tokens):
                if connection.poll(0.02):
                    self.running -= 1
                    return
                given.append(ids[n % len(ids)])
                say(requests.Token(given[-1], f"<{given[-1]}>", [[given[-1], "x", 1.5]] * bool(asked.top_logits)))
            text = "".join(f"<{i}>" for i in given)
            self.running -= 1
            say(requests.Finished(given, text, "length", "length", None, 0, 1.0, 0.5, 0.25, len(ids), len(given) - 1, 0))

    def rank(self, number):
        beat = heartbeat.read(memoryview(self.maps[number]))
        incarnation, pid = self.started.get(number, (0, 0))
        state = "down" if number not in self.started else beat.state if beat and beat.incarnation == incarnation else "starting"
        calls = beat.calls if beat and beat.incarnation == incarnation else 0
        reason = self.gone.get(number, "")
        rung = "in-place" if state in ("ready", "serving") else ""
        return [number, incarnation, state, reason, 3, calls, 1, 2, "cpu", "stand-in", rung, {"in-place": 7}, pid]

    def status(self, state):
        ranks = [self.rank(r) for r in range(self.spec.world_size)]
        serving = [r for r in ranks if r[2] in ("ready", "serving")]
        gone = [n for n, reason in self.gone.items() if n not in self.started]
        if state == "ready" and len(serving) + len(gone) < len(ranks):
            state = "starting"
        report = [f"routed experts: world {len(serving)}"] if state == "ready" else []
        return supervision.Status(state, "stand-in", 5, 10, 1.0, self.running, 0, 3, report, ranks)

    def run(self, todo):
        state = "starting" if todo == "slow" else "ready"
        asked = False
        while True:
            if select.select([self.sock, self.spec.lifeline_fd], [], [], 0.02)[0] and os.getppid() != self.spec.launcher_pid:
                return 0
            while (packet := supervision.receive(self.sock)) is not None:
                message, fds = packet
                if isinstance(message, supervision.Shutdown):
                    return 0
                if isinstance(message, supervision.WorkerStarted):
                    assert len(fds) == 1
                    self.started[message.rank] = message.incarnation, message.pid
                    self.gone.pop(message.rank, None)
                elif isinstance(message, supervision.WorkerGone):
                    self.started.pop(message.rank, None)
                    self.gone[message.rank] = message.reason
                for fd in fds:
                    os.close(fd)
            told = self.status(state)
            supervision.send(self.sock, told)
            if todo == "kill-worker" and told.state == "ready" and not asked:
                asked = supervision.send(self.sock, supervision.KillWorker(0, self.started[0][0], "no progress for 30.0 s"))


def main(path):
    spec = CoordinatorSpec.load(path)
    child.die_with_parent(spec.launcher_pid)
    logs.setup("coordinator", None, spec.incarnation, spec.log_level)
    fault = spec.faults[0] if spec.faults else {"do": ""}
    coordinator = Coordinator(spec)
    if fault["do"] == "exit":
        sys.stderr.write(fault["words"] + "\n")
        return fault["code"]
    if fault["do"] == "silent":
        time.sleep(60)
    if fault["do"] == "fatal":
        supervision.send(coordinator.sock, supervision.Fatal(4, "coordinator: 9 GiB needed, 1 GiB free"))
        return 4
    return coordinator.run(fault["do"])


sys.exit(main(sys.argv[1]))
