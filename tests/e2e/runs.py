"""A detached run driven through the command line, in folders of its own, for end-to-end tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from safetensors.numpy import load_file

CARDS = int(os.environ.get("EVRUN_TEST_CARDS", "0"))
"""Run the workers on so many cards, which they share, instead of the CPU; XDG_CACHE_HOME keeps the compiled kernels."""
GOLDEN = Path(__file__).parents[1] / "golden"
VARIANTS = {"fp32": ("float32", "reference"), "fp32noaq": ("float32", "weights-only"), "bf16": ("bfloat16", "reference")}


class Dumped(NamedTuple):
    """A request's answer and dumps."""

    answer: dict[str, Any]
    logits: np.ndarray
    routes: dict[str, np.ndarray]
    logits_file: bytes


class Evrun:
    """The command line with private run and state folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "XDG_RUNTIME_DIR": str(folder / "run"), "XDG_STATE_HOME": str(folder / "state"),
                    "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"] if CARDS else str(folder / "cache")}  # fmt: skip
        (folder / "run").mkdir(mode=0o700)

    def start(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "evrun.launch", *args]
        return subprocess.Popen(command, env=self.env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, **options)  # fmt: skip

    def __call__(self, *args: str, timeout_s: float = 120, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run a command to its end. Its output goes through files, so that nothing in the background can hold a pipe."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            command = [sys.executable, "-m", "evrun.launch", *args]
            done = subprocess.run(command, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=timeout_s)
            out.seek(0)
            err.seek(0)
            result = subprocess.CompletedProcess(command, done.returncode, out.read(), err.read())
        assert code is None or result.returncode == code, f"{args}: exit {result.returncode}\n{result.stdout}\n{result.stderr}"
        assert "Traceback" not in result.stderr
        return result

    def ps(self, name: str = "default") -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self("ps", "--name", name, "--json").stdout)
        return answer

    def ranks(self, name: str = "default") -> list[dict[str, Any]]:
        return [p for p in self.ps(name)["processes"] if p["role"] == "worker"]

    def rank_once(self, rank: int, name: str = "default", timeout_s: float = 30, **wanted: Any) -> dict[str, Any]:
        """The rank's line of `ps` once it shows the wanted values."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.ranks(name)[rank]
            if all(found[k] == v for k, v in wanted.items()):
                return found
            assert time.monotonic() < deadline, (wanted, found)
            time.sleep(0.1)

    def generate(self, ids: list[int], *args: str, name: str = "default", new: int = 16, code: int | None = 0) -> dict[str, Any]:
        done = self("generate", "--name", name, "--prompt-ids", ",".join(map(str, ids)), "--max-new-tokens", str(new), "--temperature", "0",
                    "--ignore-eos", "--json", *args, code=code)  # fmt: skip
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def dumped(self, ids: list[int], *args: str, name: str = "default", new: int = 16) -> Dumped:
        """(answer, logits, routes, the logits file's bytes)."""
        logits, routes = self.folder / "logits.safetensors", self.folder / "routes.safetensors"
        answer = self.generate(ids, "--dump-logits", str(logits), "--dump-routes", str(routes), *args, name=name, new=new)
        return Dumped(answer, load_file(logits)["logits"], load_file(routes), logits.read_bytes())

    def pids(self, name: str | None = None) -> list[int]:
        """Processes of runs in this folder that are alive: of one run, or of all."""
        mine = f"{self.folder}/run/evrun/{name}/" if name else str(self.folder)
        found = []
        for process in psutil.process_iter(["pid", "cmdline", "status"]):
            if process.info["status"] != psutil.STATUS_ZOMBIE and any(mine in part for part in process.info["cmdline"] or []):
                found.append(process.info["pid"])
        return found

    def assert_nothing_left(self, name: str | None = None, within_s: float = 3.0) -> None:
        deadline = time.monotonic() + within_s
        while (pids := self.pids(name)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not pids, [psutil.Process(p).cmdline() for p in pids]


@contextmanager
def evrun_in(folder: Path) -> Iterator[Evrun]:
    """The command line in `folder`; whatever a failing test left running is ended."""
    command = Evrun(folder)
    try:
        yield command
    finally:
        for pid in command.pids():
            try:
                psutil.Process(pid).kill()
            except psutil.NoSuchProcess:
                continue


@contextmanager
def running(command: Evrun, checkpoint: Path, *args: str, world: int = 4, name: str = "default") -> Iterator[Evrun]:
    """A detached run; stopped at the end, and nothing of it may be left."""
    devices = ["--workers", ",".join(f"cuda:{r % CARDS}" for r in range(world))] if CARDS else ["--device", "cpu"]
    command("launch", "--checkpoint", str(checkpoint), "--world", str(world), *devices, "--name", name, "--detach", *args)
    try:
        yield command
    finally:
        command("stop", "--name", name)
    command.assert_nothing_left(name)


def prompts(config: str) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads((GOLDEN / config / "prompts.json").read_text())
    return loaded


def expected(config: str, variant: str, prompt: str) -> dict[str, np.ndarray]:
    loaded: dict[str, np.ndarray] = load_file(GOLDEN / config / "expected" / variant / f"{prompt}.safetensors")
    return loaded
