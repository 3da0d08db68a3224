"""What a machine with cards can show and CI cannot, in one go: figures first, then tests. Every step leaves a file.

    python tests/bench/cards.py OUT [--cards 4] [--seconds 540] [--only layer,ipc] [--list]

A step that the time is too short to begin is named at the end. Exit 1 when a step failed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
EVRUN = (sys.executable, "-m", "evrun.launch")
BENCH = (*EVRUN, "bench")
PYTEST = (sys.executable, "-m", "pytest", "-q", "--maxfail", "3", "-p", "no:cacheprovider")
ANY = "not long"
RACED = "reference-bfloat16 and (bulk or matches)"


@dataclass(frozen=True)
class Step:
    name: str
    command: tuple[str, ...]
    cards: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    mps: bool = False
    needs: str = ""
    """A program that must be there."""


def layer(name: str, workers: str, *more: str, cards: int = 1, mps: bool = False) -> Step:
    return Step(
        name, (*BENCH, "layer", "--workers", workers, *more, "--json"), cards, mps=mps, needs="nvidia-cuda-mps-control" if mps else ""
    )


def first(cards: int) -> str:
    """A worker on each of so many cards."""
    return ",".join(f"cuda:{index}" for index in range(cards))


SHARED, FOUR = ",".join(["cuda:0"] * 4), first(4)
DEATH = (sys.executable, "tests/bench/card_death.py")
LARGE = str(Path(tempfile.gettempdir()) / "evrun-384-experts")
"""29 GB of full-size rows for four cards; step `large` makes it."""
ON_CARDS = {"EVRUN_TEST_CARDS": "1"}
STEPS = (
    Step("ipc", (*BENCH, "ipc", "--json"), cards=0),
    layer("layer-resident", "cuda:0", "--tokens", "1", "--only-resident"),
    Step("kernel", (*BENCH, "kernel", "--workers", "cuda:0", "--no-baseline", "--json")),
    Step("kernel-tests", (*PYTEST, "-n", "8", "-m", "gpu", "tests/kernels")),
    layer("layer", "cuda:0", "--tokens", "1,512"),
    layer("layer-sliced", SHARED, "--tokens", "1", "--only-resident"),
    layer("layer-mps", SHARED, "--tokens", "1", "--only-resident", mps=True),
    Step("rescue", (*PYTEST, "-n", "4", "-m", ANY, "tests/e2e/test_life.py", "tests/e2e/test_exact.py"), env=ON_CARDS),
    Step("golden", (*PYTEST, "-n", "4", "-m", ANY, "tests/e2e/test_golden.py", "tests/coordinator/test_model_card.py"), env=ON_CARDS),
    Step("full-rows", (*PYTEST, "-m", ANY, "tests/e2e/test_full_rows.py", "-k", "exact"), env=ON_CARDS),
    Step("doctor", (*EVRUN, "doctor", "--json")),
    Step("step", (*BENCH, "step", "--workers", "cuda:0", "--world", "1", "--json")),
    Step("demo", (*BENCH, "demo", "--workers", "cuda:0", "--deals", "sorted", "--json")),
    Step("kernel-triton", (*BENCH, "kernel", "--workers", "cuda:0", "--gpu-kernel", "triton", "--no-baseline", "--json")),
    Step("kernel-split", (*BENCH, "kernel", "--workers", SHARED, "--tokens", "1", "--no-baseline", "--json")),
    Step("link", (*BENCH, "link", "--cards", "0", "--json")),
    Step("stage", (*BENCH, "stage", "--json")),
    Step(
        "memcheck", ("compute-sanitizer", "--error-exitcode", "9", *PYTEST, "-m", "gpu", "tests/kernels", "-k", "reference and bfloat16"),
        needs="compute-sanitizer",
    ),
    Step(
        "racecheck",
        ("compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "9", *PYTEST, "-m", "gpu", "tests/kernels", "-k", RACED),
        needs="compute-sanitizer",
    ),
    Step("link-2", (*BENCH, "link", "--cards", "0,1", "--json"), 2),
    layer("layer-2", "cuda:0,cuda:1", "--tokens", "1,512", cards=2),
    Step("kernel-split-2", (*BENCH, "kernel", "--workers", "cuda:0,cuda:1", "--tokens", "1", "--no-baseline", "--json"), 2),
    Step("rescue-2", (*PYTEST, "-n", "4", "-m", ANY, "tests/e2e/test_life.py", "tests/e2e/test_exact.py"), 2, {"EVRUN_TEST_CARDS": "2"}),
    Step("death-2", DEATH, 2, {"EVRUN_TEST_CARDS": "2"}),
    Step("large", (*EVRUN, "make-checkpoint", LARGE, "--preset", "full-rows", "--layers", "4", "--experts", "384"), 4),
    Step("doctor-4", (*EVRUN, "doctor", "--checkpoint", LARGE, "--json"), 4),
    Step("link-4", (*BENCH, "link", "--cards", "0,1,2,3", "--json"), 4),
    *(
        layer(f"layer-4-{world}-{deal}", first(world), "--checkpoint", LARGE, "--tokens", "1,512", "--deal", deal, cards=4)
        for world in (1, 2, 4)
        for deal in ("sorted", "home")
    ),
    *(
        Step(f"step-4-{deal}", (*BENCH, "step", "--checkpoint", LARGE, "--workers", FOUR, "--world", "1,2,4", "--deal", deal, "--json"), 4)
        for deal in ("sorted", "home")
    ),
    Step("golden-4", (*PYTEST, "-n", "4", "-m", ANY, "tests/e2e/test_golden.py", "tests/e2e/test_exact.py"), 4, {"EVRUN_TEST_CARDS": "4"}),
    Step("death-4", (*DEATH, "--world", "4", "--rank", "2", "--checkpoint", LARGE), 4, {"EVRUN_TEST_CARDS": "4"}),
)  # fmt: skip


@contextmanager
def mps_daemon(folder: Path) -> Iterator[dict[str, str]]:
    """Environment of processes that share a card through it."""
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps")}
    (folder / "mps").mkdir(exist_ok=True)
    own = os.environ | env
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=own, check=True)
    try:
        yield env
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=own, check=False)


def perform(step: Step, out: Path, within_s: float) -> int:
    """Exit code of a step; its output goes to OUT/NAME.json (figures) or OUT/NAME.log."""
    what = "json" if "--json" in step.command or DEATH[1] in step.command else "log"
    with (out / f"{step.name}.{what}").open("wb") as written, (out / f"{step.name}.err").open("wb") as errors:

        def started(env: Mapping[str, str]) -> int:
            try:
                return subprocess.run(
                    step.command,
                    cwd=ROOT,
                    env={**os.environ, **step.env, **env},
                    stdout=written,
                    stderr=errors,
                    timeout=within_s,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                return 124

        if not step.mps:
            return started({})
        with mps_daemon(out) as env:
            return started(env)


@click.command(help=__doc__)
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--cards", default=1, show_default=True)
@click.option("--seconds", default=3600.0, show_default=True)
@click.option("--only", default="", help="Names of steps, with commas.")
@click.option("--list", "listed", is_flag=True, help="Say what would be done.")
def main(out: Path, cards: int, seconds: float, only: str, listed: bool) -> None:
    os.environ.setdefault("XDG_CACHE_HOME", str(out.absolute() / "cache"))  # tests on cards keep compiled kernels there
    wanted = [s for s in STEPS if s.cards <= cards and (not only or s.name in only.split(","))]
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    failed = 0
    for step in wanted:
        left = end - time.monotonic()
        if listed or left < 20 or (step.needs and not shutil.which(step.needs)):
            why = "" if listed else "no time left" if left < 20 else f"no {step.needs} here"
            click.echo(f"{step.name}: {why or ' '.join(step.command)}")
            continue
        started = time.monotonic()
        code = perform(step, out, left)
        failed += code != 0
        click.echo(f"{step.name}: exit {code}, {time.monotonic() - started:.0f} s")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
