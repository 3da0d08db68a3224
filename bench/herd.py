"""Real worker processes under a fleet in this process: what the launcher does, in few lines, for benchmarks and tests."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from evrun.bench.devices import CACHE
from evrun.coordinator.expert_client import ExpertClient
from evrun.coordinator.fleet import Fleet
from evrun.coordinator.spec import CoordinatorSpec
from evrun.expert_worker.spec import WorkerSpec
from evrun.expert_worker.wire import supervision
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.slots import SlotLayout
from evrun.kernels import registry


class Herd:
    """A fleet, its expert client and its workers. `kill`, `start` and `reap` are what the launcher would do."""

    def __init__(self, folder: Path, checkpoint: Path, world: int, **options: Any) -> None:
        self.folder = folder
        self.checkpoint = Checkpoint.open(checkpoint)
        config = self.checkpoint.config
        options = {
            "numerics": "reference", "dtype": "bfloat16", "combine": "exact", "deal": "sorted", "transport": "doorbell", "chunk": 64,
            "on_loss": "elastic", "stall_timeout_s": 2.0, "kill_timeout_s": 30.0, "faults": [], "check_payload": False,
            "backend": registry.choose()[0], "devices": ["cpu"] * world, "card_cache_bytes": -1, "pin_budget_bytes": 1 << 40, "threads": 1,
            "cpus": [sorted(os.sched_getaffinity(0))] * world, "rungs": ["registered", "arena"],
            "timeline": "", **options,
        }  # fmt: skip
        self.options = options
        layout = SlotLayout.of(config, world, options["chunk"], options["dtype"], options["combine"])
        self._fds: list[int] = []
        self.call_fd = self._memory("calls", layout.call_bytes)
        self.reply_fds = [self._memory(f"rank-{r}", layout.reply_bytes) for r in range(world)]
        self.bells = [(self._own(os.eventfd(0)), self._own(os.eventfd(0))) for _ in range(world)]
        self._lifeline = os.pipe()
        for fd in self._lifeline:
            self._own(fd)
        self.launcher, coordinator = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.secret, self.run_id = secrets.token_hex(16), secrets.token_hex(4)
        self.address = f"ipc://{folder}/hub-{self.run_id}"
        spec = CoordinatorSpec(
            run_id=self.run_id, name="test", secret=self.secret, incarnation=1, world_size=world, checkpoint=str(checkpoint), device="cpu",
            cpus=[], threads=1, numerics=options["numerics"], dtype=options["dtype"], dense_dtype="fp8", deal=options["deal"],
            combine=options["combine"], prefill_chunk=options["chunk"], max_context=4096, on_loss=options["on_loss"],
            transport=options["transport"], stall_timeout_s=options["stall_timeout_s"], kill_timeout_s=options["kill_timeout_s"],
            first_call_timeout_s=20, start_timeout_s=60, hub_address=self.address, requests_path=f"{folder}/requests",
            supervision_fd=coordinator.fileno(), call_fd=self.call_fd, reply_fds=self.reply_fds,
            request_bell_fds=[b[0] for b in self.bells], reply_bell_fds=[b[1] for b in self.bells], lifeline_fd=self._lifeline[0],
            launcher_pid=os.getpid(), cache_dir=str(folder), check_payload=options["check_payload"],
        )  # fmt: skip
        self.fleet = Fleet(spec, config)
        coordinator.close()
        self.experts = ExpertClient(spec, self.fleet)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.incarnations = dict.fromkeys(range(world), 0)
        for rank in range(world):
            self.start(rank)

    def start(self, rank: int) -> None:
        self.incarnations[rank] += 1
        o = self.options
        spec = WorkerSpec(
            run_id=self.run_id, name="test", secret=self.secret, rank=rank, world_size=len(self.reply_fds),
            incarnation=self.incarnations[rank], checkpoint=str(self.checkpoint.directory), shard_identity=self.checkpoint.identity(),
            device=o["devices"][rank], cpus=o["cpus"][rank], threads=o["threads"], backend=o["backend"], numerics=o["numerics"],
            dtype=o["dtype"], combine=o["combine"],
            prefill_chunk=o["chunk"], transport=o["transport"], hub_address=self.address, call_fd=self.call_fd,
            reply_fd=self.reply_fds[rank], request_bell_fd=self.bells[rank][0], reply_bell_fd=self.bells[rank][1],
            lifeline_fd=self._lifeline[0], launcher_pid=os.getpid(), faults=o["faults"], cache_dir=str(CACHE),
            card_cache_bytes=o["card_cache_bytes"], pin_budget_bytes=o["pin_budget_bytes"], rungs=o["rungs"],
            timeline=o["timeline"].format(rank=rank),
        )  # fmt: skip
        path = self.folder / f"worker-{rank}.{spec.incarnation}.json"
        path.write_text(spec.dump())
        fds = (self.call_fd, self.reply_fds[rank], *self.bells[rank], self._lifeline[0])
        log = (self.folder / f"worker-{rank}.{spec.incarnation}.log").open("wb")
        with log:
            command = [sys.executable, "-m", "evrun.expert_worker", str(path)]
            process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, stderr=log, stdout=log)
        self.processes[rank] = process
        pidfd = os.pidfd_open(process.pid)
        assert supervision.send(self.launcher, supervision.WorkerStarted(rank, spec.incarnation, process.pid), (pidfd,))
        os.close(pidfd)

    def signal(self, rank: int, number: int = signal.SIGKILL) -> None:
        self.processes[rank].send_signal(number)

    def reap(self, rank: int, returns: bool = True) -> None:
        """Wait for the process's end and say it to the coordinator."""
        code = self.processes[rank].wait(10)
        reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        supervision.send(self.launcher, supervision.WorkerGone(rank, self.incarnations[rank], reason, returns))

    def settle(self, timeout_s: float = 60) -> None:
        """Until every rank is ready, or gone."""
        deadline = time.monotonic() + timeout_s
        while not self.fleet.settled():
            dead = [r for r, p in self.processes.items() if self.fleet.ranks[r].state != "gone" and p.poll() is not None]
            assert not dead, [self.log(r) for r in dead]
            assert time.monotonic() < deadline, [(r.rank, r.state, r.reason) for r in self.fleet.ranks]
            self.fleet.pump(0.05)

    def log(self, rank: int) -> str:
        return (self.folder / f"worker-{rank}.{self.incarnations[rank]}.log").read_text()

    def close(self) -> None:
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
        self.fleet.close()
        for process in self.processes.values():
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.fleet.release()
        self.launcher.close()
        for fd in self._fds:
            os.close(fd)

    def _own(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _memory(self, name: str, size: int) -> int:
        fd = os.memfd_create(name)
        os.posix_fallocate(fd, 0, size)
        return self._own(fd)


@contextmanager
def herd(checkpoint: Path, world: int, **options: Any) -> Iterator[Herd]:
    """Workers that are ready, in a folder of their own; nothing is left behind."""
    with tempfile.TemporaryDirectory(prefix="evrun-test-") as folder:
        h = Herd(Path(folder), checkpoint, world, **options)
        try:
            h.settle()
            yield h
        finally:
            h.close()
