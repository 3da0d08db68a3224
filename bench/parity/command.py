"""`evrun bench parity`."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import click

from evrun.bench import report
from evrun.bench.report import Row
from evrun.expert_worker.wire.errors import RunError, UsageError

DEFAULT_PROMPT = "0,3,17,5,11"


@click.command("parity")
@click.argument("recordings", metavar="[F]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--checkpoint", metavar="DIR", type=click.Path(path_type=Path), help="Of dumps; golden folders bring their own.")
@click.option("--backends", default=None, help="As in native,torch,cuda:0. [default: native, torch and the first card]")
@click.option("--numerics", type=click.Choice(["reference", "weights-only"]), default="reference", show_default=True, help="Of a dump.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True, help="Of a dump.")
@click.option("--world", "worlds", default="4", show_default=True, help="Ranks to compare with one, as in 2,4; 0: leave out.")
@click.option("--paths", default=None, help="One prompt through these, as in cpu,cuda: best tokens and margins at each step.")
@click.option("--prompt-ids", default=None, help=f"For --paths. [default: a golden folder's first prompt, else {DEFAULT_PROMPT}]")
@click.option("--tokens", default=8, show_default=True, type=click.IntRange(1, 4096), help="Steps of --paths.")
@click.option("--json", "as_json", is_flag=True, help="One object on stdout.")
def command(
    recordings: tuple[Path, ...], checkpoint: Path | None, backends: str | None, numerics: str, dtype: str, worlds: str,
    paths: str | None, prompt_ids: str | None, tokens: int, as_json: bool,
) -> None:  # fmt: skip
    """Backends, worlds and devices against the reference and each other.

    F: golden folders (checkpoint/ beside expected/, or a folder of such) or files of --dump-activations. Without F a small
    checkpoint and its recordings are made. Exit code 5 when something is farther off than it is stated to be.
    """
    from evrun.bench.parity import activations, backend, own, stated
    from evrun.bench.parity import experts as compared
    from evrun.bench.parity import paths as through

    counts = [w for w in _numbers("--world", worlds) if w]
    ids = _numbers("--prompt-ids", prompt_ids) if prompt_ids else None
    names = backends.split(",") if backends else ["native", "torch", *_first_card()]
    chosen = [backend.parse(name) for name in names]
    routes = [backend.parse(name) for name in paths.split(",")] if paths else []
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="evrun-parity-") as folder:
        arithmetic = (numerics, dtype)
        sources = activations.find(list(recordings), checkpoint) if recordings else [own.record(Path(folder), arithmetic)]
        if routes:
            where = sources[0].checkpoint
            rows = through.compare(where, routes, counts or [1], arithmetic, ids or _first_prompt(where), tokens)
        else:
            for _, group in itertools.groupby(sources, key=lambda s: s.checkpoint):
                of_checkpoint = list(group)
                golden = any(s.data in activations.VARIANTS for s in of_checkpoint)
                for one in stated.ALL if golden else (arithmetic,):
                    rows += compared.compare(of_checkpoint, chosen, one, counts if one == stated.ALL[0] or not golden else [])
    report.show("parity", rows, as_json)
    _judge(rows)


def _judge(rows: list[Row]) -> None:
    """Raises RunError for what is farther off than stated."""
    wrong = [row for row in rows if row.get("holds") is False or row.get("verdict") == "FAULT"]
    if not wrong:
        return
    first = wrong[0]
    where = f"{first['backend']}, world {first['world']}"
    if "step" in first:
        what = f"step {first['step']}: logits differ by {first['max_difference']:.3g}, more than rounding explains"
    else:
        off = f"relative rms {first['rms']:.3g}, max {first['max_abs']:.3g} at {first['worst']}"
        what = f"{first['data']}, {first['numerics']} {first['dtype']}: expected {first['stated']}, found {off}"
    raise RunError(f"parity: {len(wrong)} of {len(rows)} comparisons fail, first: {where}: {what}")


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option}: expected integers with commas between them, found {text!r}") from None


def _first_card() -> list[str]:
    from evrun.kernels import cuda

    return ["cuda:0"] if cuda.probe() is None else []


def _first_prompt(checkpoint: Path) -> list[int]:
    """Of the golden folder that the checkpoint lies in."""
    try:
        ids: list[int] = json.loads((checkpoint.parent / "prompts.json").read_text())[0]["ids"]
    except (OSError, ValueError, KeyError, IndexError):
        return _numbers("--prompt-ids", DEFAULT_PROMPT)
    return ids
