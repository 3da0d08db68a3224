"""`evrun make-checkpoint`: a random checkpoint in the release's exact format, of any geometry."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from evrun.launch.screen import Loading, Terminal

FIRST_S = 0.5
"""Nothing is said about what takes less."""
REFRESH_S = 0.1

SIZES = {
    "vocab": ("vocab_size", "tokens of the vocabulary"),
    "hidden": ("hidden_size", "hidden size H, a multiple of 32"),
    "intermediate": ("moe_intermediate_size", "intermediate size I of every expert, a multiple of 32"),
    "layers": ("num_hidden_layers", "layers; roles follow in the release's proportions"),
    "experts": ("n_routed_experts", "routed experts of a layer"),
    "top-k": ("num_experts_per_tok", "routed experts of a token"),
    "heads": ("num_attention_heads", "attention heads"),
    "head-dim": ("head_dim", "channels of a head, a multiple of 32"),
    "rope-dim": ("qk_rope_head_dim", "channels of a head that rotate"),
    "q-rank": ("q_lora_rank", "rank of the query projection, a multiple of 32"),
    "o-rank": ("o_lora_rank", "rank of the output projection of one group"),
    "o-groups": ("o_groups", "groups of heads of the output projection"),
    "window": ("sliding_window", "tokens of the sliding window"),
    "max-context": ("max_position_embeddings", "longest context of the model"),
    "yarn-original": ("rope_scaling.original_max_position_embeddings", "context length before YaRN"),
    "index-heads": ("index_n_heads", "heads of the indexer"),
    "index-head-dim": ("index_head_dim", "channels of an indexer head, a multiple of 32"),
    "index-topk": ("index_topk", "compressed positions that a token attends to"),
    "candidate-source": ("candidate_source_layer_id", "layer that builds the candidate pool, -1: none"),
    "candidate-blocks": ("candidate_topk_blocks", "blocks of the candidate pool"),
    "candidate-block-size": ("candidate_block_size", "positions of a block"),
    "streams": ("hc_mult", "residual streams of the hyper-connections"),
    "sinkhorn": ("hc_sinkhorn_iters", "Sinkhorn repetitions"),
    "engram-ngram": ("engram_max_ngram_size", "longest n-gram of Engram"),
    "engram-heads": ("engram_n_heads", "hash heads of an n-gram order"),
    "engram-head-dim": ("engram_head_dim", "columns of an Engram row, a multiple of 32"),
    "engram-vocab-size": ("engram_vocab_size", "rows of an Engram table: about this for every order and head"),
}
"""Option -> (key of the config, what it says)."""

FACTORS = {
    "swiglu-limit": ("swiglu_limit", "clamp of every expert"),
    "route-scale": ("routed_scaling_factor", "factor of the routed weights"),
    "yarn-factor": ("rope_scaling.factor", "YaRN factor"),
}

LISTS = {
    "ratios": ("compress_ratios", "compress ratio of every layer, e.g. 0,2,1"),
    "kv-sources": ("kv_source_layer_ids", "layers with a compressor"),
    "index-sources": ("index_source_layer_ids", "layers with an indexer"),
    "engram-layers": ("engram_layer_ids", "layers with Engram, or none"),
}


def _ids(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """`0,2,1`, or `none` for an empty list."""
    if value is None:
        return None
    if value.strip() in ("", "none"):
        return ()
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"expected numbers with commas between them, or none; found {value!r}", ctx, param) from None


def _geometry_options(command: click.Command) -> None:
    for flag, (key, text) in (SIZES | FACTORS | LISTS).items():
        kind = click.INT if flag in SIZES else click.FLOAT if flag in FACTORS else click.STRING
        lists: dict[str, Any] = {"callback": _ids, "metavar": "N,N,..."} if flag in LISTS else {}
        command.params.append(click.Option([f"--{flag}", key.replace(".", "__")], type=kind, help=text, **lists))


def _presets(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from evrun.launch.export.geometry import PRESETS

        for name, (text, _) in PRESETS.items():
            click.echo(f"{name:10} {text}")
        ctx.exit()


@click.command("make-checkpoint")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--preset", default="tiny", show_default=True, help="geometry to start from; see --presets")
@click.option("--presets", is_flag=True, is_eager=True, expose_value=False, callback=_presets, help="list the presets")
@click.option("--seed", type=int, default=0, show_default=True, help="same seed, same bytes")
@click.option("--scatter", type=click.IntRange(0), default=0, metavar="N", help="throw every tensor on its own into one of N shards")
@click.option("--layout", type=click.Choice(["nested", "flat", "both"]), default="nested", show_default=True, help="config files to write")
@click.option("--force", is_flag=True, help="replace a checkpoint that lies in DIR")
def make_checkpoint(directory: Path, preset: str, seed: int, scatter: int, layout: Any, force: bool, **geometry_options: Any) -> None:
    """Write a random checkpoint in the release's exact format into DIR.

    Every option of the geometry that is not given comes from the preset; layer roles that are not given follow from the
    number of layers.
    """
    from evrun.launch.export import geometry
    from evrun.launch.export.checkpoint import complete, write_checkpoint

    given = {key.replace("__", "."): value for key, value in geometry_options.items() if value is not None}
    config = complete(geometry.values(preset, **given))
    terminal = Terminal()
    started = time.monotonic()
    try:
        with _stoppable():
            size = write_checkpoint(
                config, directory, seed, scatter=scatter, layout=layout, force=force, progress=_Reporter(terminal, str(directory))
            )
    finally:
        terminal.close()
    seconds = time.monotonic() - started
    rows = f"{config.n_routed_experts} experts of {config.hidden_size} x {config.moe_intermediate_size}"
    speed = f"{size / 1e6:.1f} MB of tensors in {seconds:.1f} s, {size / 1e6 / max(seconds, 1e-9):.0f} MB/s"
    click.echo(f"{directory}: {config.num_hidden_layers} layers x {rows}, {speed}")


class _Reporter:
    """Passes progress on, a few times a second."""

    def __init__(self, terminal: Terminal, what: str) -> None:
        self._terminal = terminal
        self._what = what
        self._next_s = time.monotonic() + FIRST_S

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + REFRESH_S
            self._terminal.loading(Loading(f"writing {self._what}", done, total, []))


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C does, so that nothing half-written stays."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_geometry_options(make_checkpoint)
