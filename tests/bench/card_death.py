"""A worker killed in mid-generation: the answer, what it owed, and the memory of every card around it.

    EVRUN_TEST_CARDS=2 XDG_CACHE_HOME=DIR python tests/bench/card_death.py [--world 2] [--rank 1] [--checkpoint DIR] > OUT.json

EVRUN_TEST_CARDS and XDG_CACHE_HOME as for the end-to-end tests, whose driver this is (tests/e2e/runs.py). Exit 1 when the
answers differ.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import click
import pynvml

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from runs import CARDS, evrun_in, running

PROMPT = list(range(3, 35))
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


@click.command(help=__doc__)
@click.option("--world", default=2, show_default=True)
@click.option("--rank", default=1, show_default=True)
@click.option("--checkpoint", help="Default: a small one of full-size rows.")
@click.option("--tokens", default=100, show_default=True)
def main(world: int, rank: int, checkpoint: str | None, tokens: int) -> None:
    with tempfile.TemporaryDirectory(prefix="evrun-death-") as name, evrun_in(Path(name)) as evrun:
        where = Path(checkpoint or f"{name}/c")
        if checkpoint is None:
            evrun("make-checkpoint", str(where), "--preset", "full-rows", "--experts", "32", timeout_s=300)
        memory = {"before the run": memory_mib()}
        with running(evrun, where, "--combine", "exact", world=world):
            calm = evrun.generate(PROMPT, new=tokens)
            memory["serving"] = memory_mib()
            request = evrun.start(
                "generate", "--prompt-ids", ",".join(map(str, PROMPT)), "--max-new-tokens", str(tokens), "--temperature", "0",
                "--ignore-eos", "--json",
            )  # fmt: skip
            time.sleep(calm["seconds"]["prefill"] + calm["seconds"]["decode"] / 2)  # beside it the command's own start
            evrun("kill", str(rank), "--signal", "KILL", "--hold")
            time.sleep(SETTLE_S)
            memory["killed"] = memory_mib()
            answer = json.loads(request.communicate(timeout=600)[0])
            evrun("restart", str(rank))
            evrun.rank_once(rank, timeout_s=120, state="ready")
            evrun.generate(PROMPT, new=tokens)
            memory["back"] = memory_mib()
        time.sleep(SETTLE_S)
        memory["stopped"] = memory_mib()
    same = answer["token_ids"] == calm["token_ids"]
    seconds = {"undisturbed": calm["seconds"], "with the death": answer["seconds"]}
    found = {"cards": CARDS, "world": world, "rank": rank, "same_tokens": same, "tokens": tokens, "resends": answer["resends"]}
    click.echo(json.dumps(found | {"seconds": seconds, "card_memory_mib": memory}, indent=1))
    sys.exit(not same)


if __name__ == "__main__":
    main()
