"""Prefill and decode steps of one prompt through real workers, timed by phase; every prompt twice, so that a cold pass shows."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from evrun.bench.devices import CACHE
from evrun.bench.herd import Herd, herd
from evrun.bench.report import Row
from evrun.bench.step.phases import PHASES, Pass, RankSpans, Seconds, split
from evrun.coordinator import expert_client
from evrun.coordinator.engram_map import cached_token_map
from evrun.coordinator.models.registry import Model, load_model
from evrun.expert_worker.timeline import WORKER_PHASES, Part, Span, Timeline, read
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.launch.config import RunConfig
from evrun.launch.devices import look
from evrun.launch.doctor.examine import token_bytes
from evrun.launch.plan import Plan, make_plan

PASSES = 2


@dataclass(frozen=True)
class Work:
    """What is run."""

    checkpoint: Path
    prompt_tokens: int
    decode_tokens: int
    chunk: int
    combine: str
    deal: str
    dense_dtype: str


class TimedExperts:
    """The model's experts, with a span for every submit and collect; counts the rows that the calls need."""

    def __init__(self, h: Herd, timeline: Timeline) -> None:
        self._submit = timeline.timed(h.experts.__call__, "submit")
        self._timeline = timeline
        self.rows = 0

    def __call__(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.rows += len(ids.unique())
        collect: Callable[[], torch.Tensor] = self._timeline.timed(self._submit(layer, x, ids, weights), "collect")
        return collect


@dataclass(frozen=True)
class Measured:
    """One pass: what it was, and the experts' rows that it needed."""

    number: int
    one: Pass
    rows: int


def run(work: Work, workers: Sequence[str], worlds: Sequence[int]) -> tuple[list[Row], list[tuple[str, list[Span]]]]:
    """(rows, the newest decode step of the last world as (process, spans)). World w has the first w devices, over and over."""
    checkpoint = Checkpoint.open(work.checkpoint)
    rows: list[Row] = []
    trace: list[tuple[str, list[Span]]] = []
    model: Model | None = None
    affinity = os.sched_getaffinity(0)
    try:
        for world in worlds:
            devices = [workers[rank % len(workers)] for rank in range(world)]
            plan = _plan(checkpoint, devices)
            os.sched_setaffinity(0, plan.coordinator.cpus)
            torch.set_num_threads(plan.coordinator.threads)
            model = model or _load(checkpoint, work.dense_dtype)
            measured, ranks, backend = _measure(checkpoint, model, work, plan)
            rows += _rows(checkpoint, work, devices, backend, measured, [RankSpans(spans) for spans in ranks])
            last = measured[-1].one
            trace = [("coordinator", [Span("forward", last.start_ns, last.end_ns), *last.spans])]
            trace += [(f"rank {r}", RankSpans(spans).between(last.start_ns, last.end_ns)) for r, spans in enumerate(ranks)]
    finally:
        os.sched_setaffinity(0, affinity)
    return rows, trace


def _plan(checkpoint: Checkpoint, devices: list[str]) -> Plan:
    """The places that a launch would give. Raises DeviceError for a card that is not there."""
    config = RunConfig(checkpoint=str(checkpoint.directory), workers=tuple(devices))
    return make_plan(config, look(os.environ), checkpoint.config, checkpoint.identity())


def _load(checkpoint: Checkpoint, dense_dtype: str) -> Model:
    token_map = cached_token_map(checkpoint.directory, checkpoint.config, CACHE) if checkpoint.config.engram_layer_ids else None
    return load_model(
        checkpoint, dtype="bfloat16", numerics="reference", dense_dtype=dense_dtype, device="cpu", token_map=token_map,
        progress=lambda done, what: None,
    )  # fmt: skip


def _measure(checkpoint: Checkpoint, model: Model, work: Work, plan: Plan) -> tuple[list[Measured], list[list[Span]], str]:
    """(passes in order, spans of every rank, what the workers are)."""
    prompt = (np.arange(work.prompt_tokens) * 37 + 5) % checkpoint.config.vocab_size
    timeline = Timeline()
    with tempfile.TemporaryDirectory(prefix="evrun-step-") as folder:
        options: dict[str, Any] = {"combine": work.combine, "deal": work.deal, "chunk": min(work.chunk, work.prompt_tokens)}
        options |= {"timeline": f"{folder}/{{rank}}", "stall_timeout_s": 60.0, "kill_timeout_s": 120.0}
        options |= {"pin_budget_bytes": plan.pin_budget, "card_cache_bytes": card_cache(plan)}
        places = {"devices": [seat.device for seat in plan.ranks], "cpus": [list(seat.cpus) for seat in plan.ranks]}
        threads = max(seat.threads for seat in plan.ranks)
        with herd(checkpoint.directory, plan.world, threads=threads, **places, **options) as h, _timed(timeline), torch.inference_mode():
            timeline.wrap([Part(h.fleet.round, "sum", "combine")])
            experts = TimedExperts(h, timeline)
            measured = [m for number in range(1, PASSES + 1) for m in _pass(number, model, prompt.tolist(), work, experts, timeline)]
            backend = f"{h.fleet.ranks[0].backend}, {h.fleet.ranks[0].rung}"
        return measured, [read(Path(folder) / str(rank)) for rank in range(plan.world)], backend


def card_cache(plan: Plan) -> int:
    """Bytes of every worker's card cache: what is free (-1), or a share of three quarters where workers share a card."""
    sharing = Counter(seat.device for seat in plan.ranks if seat.device != "cpu")
    return min((plan.card_memory[device] * 3 // 4 // count for device, count in sharing.items() if count > 1), default=-1)


@contextmanager
def _timed(timeline: Timeline) -> Iterator[None]:
    """The expert client's own functions, timed for a while."""
    names = {"deal": "deal", "combine_partials": "combine", "combine_rows": "combine"}
    before = {name: getattr(expert_client, name) for name in names}
    for name, phase in names.items():
        setattr(expert_client, name, timeline.timed(before[name], phase))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(expert_client, name, function)


def _pass(number: int, model: Model, prompt: list[int], work: Work, experts: TimedExperts, timeline: Timeline) -> Iterator[Measured]:
    """The prompt in chunks, then the greedy tokens after it; the sequence is new."""
    state = model.new_state(len(prompt) + work.decode_tokens)
    chunks = [prompt[start : start + work.chunk] for start in range(0, len(prompt), work.chunk)]
    fed = chunks[0]
    for step in range(len(chunks) + work.decode_tokens):
        seen, rows = len(timeline.spans), experts.rows
        start = time.monotonic_ns()
        logits = model.forward(fed, state, experts)
        end = time.monotonic_ns()
        spans = tuple(timeline.spans[seen:])
        kind = "prefill" if step < len(chunks) else "decode"
        yield Measured(number, Pass(kind, len(fed), model.config.num_hidden_layers, start, end, spans), experts.rows - rows)
        fed = chunks[step + 1] if step + 1 < len(chunks) else [int(logits[-1].argmax())]


def _rows(
    checkpoint: Checkpoint, work: Work, devices: Sequence[str], backend: str, measured: Sequence[Measured], ranks: Sequence[RankSpans]
) -> list[Row]:
    """One row per pass, kind and phase: seconds of a prefill, of the decode step in the middle."""
    config = checkpoint.config
    attention, shared, head = token_bytes(config)
    found: list[Row] = []
    for number in range(1, PASSES + 1):
        for kind in ("prefill", "decode"):
            mine = [m for m in measured if m.number == number and m.one.kind == kind]
            parts = [split(m.one, ranks) for m in mine]
            if kind == "prefill":
                total, passes, tokens, rows = _sum(parts), len(mine), work.prompt_tokens, sum(m.rows for m in mine)
            else:
                total, passes, tokens, rows = _middle(parts), 1, 1, int(median(m.rows for m in mine))
            size: dict[str, int] = {"dense tree": (attention + shared) * passes, "head": head * passes}
            size |= dict.fromkeys(WORKER_PHASES, rows * config.row_bytes)
            base: Row = {"kind": kind, "pass": number, "world": len(devices), "workers": ",".join(sorted(set(devices))), "backend": backend}
            base |= {"tokens": tokens, "steps": len(mine), "layers": config.num_hidden_layers, "hidden": config.hidden_size}
            base |= {"deal": work.deal, "dense_dtype": work.dense_dtype}
            found += [_row(base, phase, total, size.get(phase)) for phase in PHASES]
            covered = sum(total.visible.values())
            found.append(base | {"phase": "sum", "seconds": covered, "of_wall": covered / total.wall})
            found.append(base | {"phase": "wall", "seconds": total.wall, "tokens_per_s": tokens / total.wall})
    return found


def _row(base: Row, phase: str, total: Seconds, size: float | None) -> Row:
    row: Row = base | {"phase": phase, "seconds": total.visible[phase]}
    busy = total.worker.get(phase, total.visible[phase])
    if phase in WORKER_PHASES:
        row["worker_seconds"] = busy
    if size and busy > 0:
        row |= {"bytes": int(size), "gib_per_s": size / busy / 2**30}
    return row


def _sum(parts: Sequence[Seconds]) -> Seconds:
    total = Seconds(wall=sum(p.wall for p in parts))
    total.visible = {phase: sum(p.visible[phase] for p in parts) for phase in total.visible}
    total.worker = {phase: sum(p.worker[phase] for p in parts) for phase in total.worker}
    return total


def _middle(parts: Sequence[Seconds]) -> Seconds:
    """The step in the middle: phases of one and the same step, so that they add up."""
    return sorted(parts, key=lambda p: p.wall)[len(parts) // 2]
