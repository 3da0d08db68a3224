"""`evrun bench step`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import click

from evrun.bench import report
from evrun.coordinator.deal import POLICIES
from evrun.expert_worker.wire.errors import RunError, UsageError


@click.command("step")
@click.option("--checkpoint", type=click.Path(path_type=Path), metavar="DIR", help="Default: a small one of full-size rows.")
@click.option("--workers", default="cpu", show_default=True, help="Devices, as in cuda:0,cuda:1.")
@click.option("--world", "worlds", default="1,4", show_default=True, help="Worker counts; devices are handed out in turn.")
@click.option("--prompt-tokens", default=64, show_default=True, type=click.IntRange(2, 1 << 20))
@click.option("--decode-tokens", default=8, show_default=True, type=click.IntRange(1, 1 << 16), help="Steps after the prompt.")
@click.option("--prefill-chunk", default=512, show_default=True, type=click.IntRange(1, 1 << 20))
@click.option("--combine", type=click.Choice(["partial", "exact"]), default="partial", show_default=True)
@click.option("--deal", type=click.Choice(list(POLICIES)), default="sorted", show_default=True)
@click.option("--dense-dtype", type=click.Choice(["fp8", "bfloat16"]), default="fp8", show_default=True)
@click.option("--trace", "trace_file", type=click.Path(path_type=Path), metavar="F.json", help="Chrome trace of the last decode step.")
@click.option("--json", "as_json", is_flag=True, help="One object on stdout.")
def command(
    checkpoint: Path | None, workers: str, worlds: str, prompt_tokens: int, decode_tokens: int, prefill_chunk: int, combine: str,
    deal: str, dense_dtype: str, trace_file: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """A whole prefill and whole decode steps, phase by phase, the same prompt twice.

    `seconds` add up to the wall time; `worker_seconds` are the slowest rank's own, hidden behind the shared expert or not.
    """
    from evrun.bench.step.run import Work, run
    from evrun.bench.step.table import print_steps
    from evrun.bench.step.trace import trace
    from evrun.launch.export.checkpoint import complete, write_checkpoint
    from evrun.launch.export.geometry import values

    try:
        counts = [int(w) for w in worlds.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UsageError(f"--world: expected worker counts with commas between them, found {worlds!r}")
    devices = workers.split(",")
    strange = [d for d in devices if d != "cpu" and not (d.startswith("cuda:") and d[5:].isdigit())]
    if strange:
        raise UsageError(f"--workers: expected cpu or cuda:K, found {strange[0]!r}")
    if trace_file and not trace_file.absolute().parent.is_dir():
        raise UsageError(f"--trace {trace_file}: expected a file in a folder that exists")
    with tempfile.TemporaryDirectory(prefix="evrun-step-") as folder:
        where = checkpoint or Path(folder) / "c"
        if checkpoint is None:
            write_checkpoint(complete(values("full-rows")), where)
        rows, spans = run(Work(where, prompt_tokens, decode_tokens, prefill_chunk, combine, deal, dense_dtype), devices, counts)
    if trace_file:
        try:
            trace_file.write_text(json.dumps(trace(spans)))
        except OSError as error:
            raise RunError(f"--trace {trace_file}: {error.strerror}; nothing was written") from error
    if as_json:
        report.show("step", rows, as_json)
    else:
        print_steps(rows)
