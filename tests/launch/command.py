"""Run evrun commands in a world of their own: private run and state folders, and a look at what is left afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evrun.expert_worker.wire.errors import EvrunError
from evrun.launch import control
from evrun.launch.run_dir import find_run

GOLDEN = Path(__file__).parents[1] / "golden"
CHECKPOINT = GOLDEN / "minimal" / "checkpoint"
STANDIN = Path(__file__).parent / "standins" / "command_line.py"
REAL = ("-m", "evrun.launch")


class World:
    """Short folders (socket paths have 107 bytes), an environment, commands. `close` checks that nothing is left."""

    def __init__(self, program: tuple[str, ...] = (str(STANDIN),)) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ev", dir="/tmp")
        self.folder = Path(self._folder.name)
        self.program = program
        for name in ("run", "state", "cache"):
            (self.folder / name).mkdir(mode=0o700)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("EVRUN_")}
        self.env |= {
            "XDG_RUNTIME_DIR": f"{self.folder}/run",
            "XDG_STATE_HOME": f"{self.folder}/state",
            "XDG_CACHE_HOME": f"{self.folder}/cache",
            "TMPDIR": str(self.folder),
            "EVRUN_CPU_KERNEL": "torch",  # nothing to measure
            "WORLD_OF_TEST": str(self.folder),
        }
        self._started: list[subprocess.Popen[str]] = []

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, *self.program, *arguments]

    def run(self, *arguments: str, timeout_s: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
        """Through files, so that a background process cannot hold a pipe open."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            found = subprocess.run(
                self.command(*arguments), stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=self.env | env, timeout=timeout_s
            )
            out.seek(0), err.seek(0)
            return subprocess.CompletedProcess(found.args, found.returncode, out.read(), err.read())

    def ok(self, *arguments: str, timeout_s: float = 60) -> str:
        found = self.run(*arguments, timeout_s=timeout_s)
        assert found.returncode == 0, (found.args, found.returncode, found.stdout, found.stderr)
        return found.stdout

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        popen = subprocess.Popen(
            self.command(*arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.env
        )
        self._started.append(popen)
        return popen

    def launch(self, *arguments: str, name: str = "default") -> None:
        self.ok("launch", "--checkpoint", str(CHECKPOINT), "--detach", "--name", name, *arguments)

    def faults(self, *faults: dict[str, Any]) -> str:
        path = self.folder / "faults.json"
        path.write_text(json.dumps(faults))
        return str(path)

    def tell(self, command: Any, name: str = "default") -> Any:
        """A command of launch.control from this process, which is quicker than a process of its own."""
        return control.ask(find_run(name, self.env), command)

    def ps(self, name: str = "default") -> dict[str, Any]:
        view: dict[str, Any] = json.loads(self.tell(control.Ps(), name).text)
        return view

    def ps_or_none(self) -> dict[str, Any] | None:
        try:
            return self.ps()
        except EvrunError:
            return None

    def kill(self, rank: int, number: int = signal.SIGKILL, hold: bool = False) -> None:
        self.tell(control.Kill(rank, number, hold))

    def stop(self, name: str = "default") -> None:
        info = find_run(name, self.env)
        self.tell(control.Stop("the test"), name)
        self.until(lambda: not info.is_running, "the launcher is gone", 10)

    def rank(self, number: int) -> dict[str, Any]:
        row: dict[str, Any] = self.ps()["processes"][1 + number]
        assert row["rank"] == number
        return row

    def until(self, holds: Callable[[], Any], what: str, within_s: float = 20) -> Any:
        deadline = time.monotonic() + within_s
        while not (found := holds()):
            assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
            time.sleep(0.02)
        return found

    def log(self, file: str, name: str = "default") -> str:
        return (self.folder / "state" / "evrun" / name / file).read_text()

    def processes(self) -> list[tuple[int, str]]:
        """Every process that was started in this world and still runs."""
        mark = f"WORLD_OF_TEST={self.folder}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if mark in (entry / "environ").read_bytes() and ") Z " not in (entry / "stat").read_text():
                        found.append((int(entry.name), (entry / "cmdline").read_text().replace("\0", " ")))
                except OSError:
                    continue
        return found

    def leftovers(self) -> list[str]:
        return sorted(str(p.relative_to(self.folder)) for p in (self.folder / "run").rglob("*"))

    def settle(self, within_s: float = 3.0) -> None:
        """Wait until no process is left."""
        self.until(lambda: not self.processes(), f"no process left, found {self.processes()}", within_s)

    def close(self) -> None:
        processes = self.processes()
        for pid, _ in processes:
            os.kill(pid, signal.SIGKILL)
        for popen in self._started:
            popen.communicate()
        left = self.leftovers()
        self._folder.cleanup()
        assert not processes, processes
        assert not left, left
