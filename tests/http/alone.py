"""The real HTTP process with the coordinator's real door, behind which an engine without a model gives tokens at its own pace."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from runs import GOLDEN
from served import MODEL, until

from evrun.coordinator.request_server import Job, RequestServer
from evrun.expert_worker.wire.requests import Finished, Started, Token
from evrun.launch import control
from evrun.launch.http.spec import HttpSpec

CHECKPOINT = GOLDEN / "minimal" / "checkpoint"
SECRET = "secret"


class Alone:
    """One front end; `pace_s` seconds a token, whose text is the time at which it was given."""

    def __init__(self, folder: Path, pace_s: float, max_queue: int) -> None:
        self.pace_s = pace_s
        self.requests_path = f"{folder}/requests.sock"
        self.begun = 0
        """Requests that reached the engine."""
        self._over = threading.Event()
        self._running = 0
        self._door = RequestServer(self.requests_path, SECRET, 1000)
        self._control = control.ControlServer(f"{folder}/control.sock", SECRET, self._answer)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = self._listener.getsockname()[1]
        spec = HttpSpec(
            run_id="r",
            name="alone",
            secret=SECRET,
            incarnation=1,
            control_address=f"ipc://{folder}/control.sock",
            requests_path=self.requests_path,
            listen_fd=self._listener.fileno(),
            host="127.0.0.1",
            launcher_pid=os.getpid(),
            checkpoint=str(CHECKPOINT),
            model_name=MODEL,
            max_context=4096,
            vocab_size=512,
            bos_token_id=0,
            eos_token_id=1,
            max_queue=max_queue,
            key_sha256="",
            stall_s=5.0,
            stuck_s=30.0,
            drain_s=1.0,
            log_level="INFO",
        )
        (folder / "spec.json").write_text(spec.dump())
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._engine, self._launcher)]
        for thread in self._threads:
            thread.start()
        with open(folder / "http.log", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "evrun.launch.http", str(folder / "spec.json")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self._listener.fileno(),),
            )
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)
        until(lambda: self.http.get("/health").status_code == 200, "the front end is up", 60)

    def close(self) -> None:
        self.http.close()
        self.process.terminate()
        try:
            assert self.process.wait(20) == 0
        finally:
            self.process.kill()
            self.process.wait()
            self._over.set()
            for thread in self._threads:
                thread.join()
            self._door.close("the test ends")
            self._control.close()
            self._listener.close()

    def post(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": MODEL, "prompt": [0, 3], **fields})

    @property
    def http_pid(self) -> int:
        return self.process.pid

    def complete(self, ids: list[int], new: int) -> dict[str, Any]:
        response = self.post(prompt=ids, max_tokens=new)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def idle(self) -> bool:
        lines = self.http.get("/metrics").text.splitlines()
        inside = [line for line in lines if line.startswith(("evrun_requests_running ", "evrun_requests_waiting "))]
        return all(line.endswith(" 0.0") for line in inside) and self._running == 0 and self._door.waiting() == 0

    def _engine(self) -> None:
        while not self._over.is_set():
            job = self._door.take()
            if job is None:
                time.sleep(0.0005)
                continue
            self._running, self.begun = 1, self.begun + 1
            self._give(job)
            self._door.done()
            self._running = 0

    def _give(self, job: Job) -> None:
        asked = job.request
        ids = asked.prompt_ids or []
        job.say(Started(ids, [""] * len(ids), ""))
        given, text = [], ""
        while len(given) < asked.max_new_tokens and not job.cancelled() and not self._over.is_set():
            time.sleep(self.pace_s)
            given.append(20 + len(given) % 400)
            piece = f"{time.perf_counter():.6f} "
            text += piece
            job.say(Token(given[-1], piece, []))
        error = f"cancelled: {job.cancel_reason}" if job.cancelled() else None
        job.say(
            Finished(
                given, text, "error" if error else "length", error or "length", error, 5 if error else 0, 0, 0, 0, len(ids), len(given), 0
            )
        )

    def _launcher(self) -> None:
        while not self._over.is_set():
            if self._control.socket.poll(50):
                self._control.serve()

    def _answer(self, command: Any) -> Any:
        row = {
            "state": "ready",
            "reason": "",
            "pid": 1,
            "incarnation": 1,
            "restarts": 0,
            "last_layer": 0,
            "progress_age_s": 0.1,
            "resends": 0,
            "dropped_replies": 0,
            "rung": "in-place",
            "bytes": {},
        }
        processes = [{"role": "coordinator", "rank": None, **row}, {"role": "worker", "rank": 0, **row}]
        look = {
            "ps": {"state": "ready", "processes": processes},
            "phase": "",
            "done_bytes": 1,
            "total_bytes": 1,
            "requests_running": self._running,
            "requests_waiting": self._door.waiting(),
            "calls": [[1, self.begun]],
        }
        return control.Processes(json.dumps(look))


@contextmanager
def alone(pace_s: float = 0.002, max_queue: int = 16) -> Iterator[Alone]:
    with tempfile.TemporaryDirectory(prefix="ev", dir="/tmp") as folder:
        made = Alone(Path(folder), pace_s, max_queue)
        try:
            yield made
        finally:
            made.close()
