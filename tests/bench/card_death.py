"""A worker killed in mid-generation: the answer, what it owed, and the memory of every card around it.

    python tests/bench/card_death.py [--workers cuda:0,cuda:1] [--rank 1] [--checkpoint DIR] [--tokens 100] > OUT.json

Exit 1 when the answers differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import pynvml

EVRUN = (sys.executable, "-m", "evrun.launch")
SETTLE_S = 0.5
"""For the driver to take back what a dead process had."""


def memory_mib() -> list[int]:
    """In use, of every card; none where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) >> 20 for handle in handles]


class Commands:
    """The command line, with private folders. What it says on stderr goes to ours."""

    def __init__(self, folder: Path) -> None:
        (folder / "run").mkdir(mode=0o700)
        self._env = {**os.environ, "XDG_RUNTIME_DIR": str(folder / "run"), "XDG_STATE_HOME": str(folder / "state")}

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*EVRUN, *args], env=self._env, text=True, stdout=subprocess.PIPE)

    def __call__(self, *args: str) -> str:
        return subprocess.run([*EVRUN, *args], env=self._env, text=True, stdout=subprocess.PIPE, check=True, timeout=600).stdout


def ranks(evrun: Commands) -> list[dict[str, Any]]:
    return [p for p in json.loads(evrun("ps", "--json"))["processes"] if p["role"] == "worker"]


@click.command(help=__doc__)
@click.option("--workers", default="cuda:0,cuda:1", show_default=True)
@click.option("--rank", default=1, show_default=True)
@click.option("--checkpoint", help="Default: a small one of full-size rows.")
@click.option("--tokens", default=100, show_default=True)
def main(workers: str, rank: int, checkpoint: str | None, tokens: int) -> None:
    with tempfile.TemporaryDirectory(prefix="evrun-death-") as name:
        folder = Path(name)
        evrun = Commands(folder)
        if checkpoint is None:
            checkpoint = str(folder / "c")
            evrun("make-checkpoint", checkpoint, "--preset", "full-rows", "--experts", "32")
        prompt = ",".join(str(3 + i) for i in range(32))
        ask = ("generate", "--prompt-ids", prompt, "--max-new-tokens", str(tokens), "--temperature", "0", "--ignore-eos", "--json")
        memory = {"before the run": memory_mib()}
        evrun("launch", "--checkpoint", checkpoint, "--workers", workers, "--combine", "exact", "--detach")
        try:
            calm = json.loads(evrun(*ask))
            memory["serving"] = memory_mib()
            request = evrun.start(*ask)
            time.sleep(calm["seconds"]["prefill"] + calm["seconds"]["decode"] / 2)  # beside it the command's own start
            evrun("kill", str(rank), "--signal", "KILL", "--hold")
            time.sleep(SETTLE_S)
            memory["killed"] = memory_mib()
            answer = json.loads(request.communicate(timeout=600)[0])
            evrun("restart", str(rank))
            while ranks(evrun)[rank]["state"] != "ready":
                time.sleep(0.2)
            evrun(*ask)
            memory["back"] = memory_mib()
        finally:
            evrun("stop")
        time.sleep(SETTLE_S)
        memory["stopped"] = memory_mib()
    same = answer["token_ids"] == calm["token_ids"]
    seconds = {"undisturbed": calm["seconds"], "with the death": answer["seconds"]}
    found = {"workers": workers, "rank": rank, "same_tokens": same, "tokens": len(answer["token_ids"]), "resends": answer["resends"]}
    click.echo(json.dumps(found | {"seconds": seconds, "card_memory_mib": memory}, indent=1))
    sys.exit(not same)


if __name__ == "__main__":
    main()
