"""One prompt through several kinds of workers: the best tokens of each at every step, so that a near tie is told from a fault.

All paths are fed the first path's tokens, so that every step starts from the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evrun.bench.devices import CACHE
from evrun.bench.herd import herd
from evrun.bench.parity.backend import Backend
from evrun.bench.parity.experts import SMALL_CACHE_BYTES
from evrun.bench.parity.stated import Arithmetic
from evrun.bench.report import Row
from evrun.coordinator.engram_map import cached_token_map
from evrun.coordinator.models.registry import Model, load_model
from evrun.coordinator.sampler import best
from evrun.coordinator.text import Text
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.errors import UsageError

TOP = 5
CHUNK = 512
FAR = {"bfloat16": 1.0, "float32": 0.35}
"""Largest difference of a logit between two right runs, in standard deviations of the logits: with rounding to bf16 0.8 was seen
on the golden prompts, in fp32 0.3 after a rounding step flipped (tests/golden/README.md)."""


@dataclass(frozen=True)
class Step:
    """The logits of one path after one more token."""

    logits: torch.Tensor
    """[V] fp32."""

    def top(self) -> list[tuple[int, float]]:
        return [(int(token), float(value)) for token, value in best(self.logits, TOP)]

    @property
    def margin(self) -> float:
        """Of the best token over the next."""
        (_, first), (_, second) = self.top()[:2]
        return first - second


def compare(
    checkpoint: Path, backends: Sequence[Backend], worlds: Sequence[int], arithmetic: Arithmetic, prompt: Sequence[int], tokens: int
) -> list[Row]:
    """Rows per step and path; the first path is the one that the others are compared with. Raises EvrunError."""
    opened = Checkpoint.open(checkpoint)
    outside = [i for i in prompt if not 0 <= i < opened.config.vocab_size]
    if outside or not prompt:
        raise UsageError(f"--prompt-ids: expected ids below {opened.config.vocab_size}, found {outside[0] if outside else 'none'}")
    model = _load(opened, arithmetic)
    text = Text(opened.directory, opened.config.bos_token_id)
    rows: list[Row] = []
    first: list[Step] = []
    for backend in backends:
        for world in worlds:
            steps = _run(opened, model, backend, world, arithmetic, prompt, tokens, [s.top()[0][0] for s in first])
            for number, step in enumerate(steps):
                rows.append(_row(number, backend, world, step, first[number] if first else None, text, arithmetic[1]))
            first = first or steps
    return sorted(rows, key=lambda row: int(row["step"] or 0))


def _load(checkpoint: Checkpoint, arithmetic: Arithmetic) -> Model:
    token_map = cached_token_map(checkpoint.directory, checkpoint.config, CACHE) if checkpoint.config.engram_layer_ids else None
    return load_model(
        checkpoint, dtype=arithmetic[1], numerics=arithmetic[0], dense_dtype="fp8", device="cpu", token_map=token_map,
        progress=lambda done, what: None,
    )  # fmt: skip


def _run(
    checkpoint: Checkpoint, model: Model, backend: Backend, world: int, arithmetic: Arithmetic, prompt: Sequence[int], tokens: int,
    fed: Sequence[int],
) -> list[Step]:  # fmt: skip
    """`tokens` steps; after the prompt `fed` tokens, or the path's own where there are none."""
    numerics, dtype = arithmetic
    options: dict[str, Any] = {"backend": backend.kernel, "devices": [backend.device] * world, "numerics": numerics, "dtype": dtype}
    options |= {"card_cache_bytes": SMALL_CACHE_BYTES, "combine": "exact", "chunk": min(CHUNK, len(prompt))}
    steps: list[Step] = []
    with herd(checkpoint.directory, world, **options) as h, torch.inference_mode():
        state = model.new_state(len(prompt) + tokens)
        for start in range(0, len(prompt), CHUNK):
            logits = model.forward(prompt[start : start + CHUNK], state, h.experts)
        steps.append(Step(logits[-1].clone()))
        while len(steps) < tokens:
            token = fed[len(steps) - 1] if fed else steps[-1].top()[0][0]
            steps.append(Step(model.forward([token], state, h.experts)[-1].clone()))
    return steps


def _row(number: int, backend: Backend, world: int, step: Step, first: Step | None, text: Text, dtype: str) -> Row:
    top = step.top()
    row: Row = {
        "step": number, "backend": backend.name, "world": world, "token": top[0][0], "piece": text.piece(top[0][0]), "margin": step.margin,
        "top": "  ".join(f"{token} {text.piece(token)!r} {value:.3f}" for token, value in top),
    }  # fmt: skip
    if first is None:
        return row | {"max_difference": 0.0, "verdict": "-"}
    gap = float((step.logits - first.logits).abs().max())
    return row | {"max_difference": gap, "verdict": verdict(first, step, gap, dtype)}


def verdict(first: Step, step: Step, gap: float, dtype: str) -> str:
    """`same` token, `near tie` when another one is best though the logits are as close as two right runs are, else `FAULT`.

    Another token alone proves nothing: two tokens can only change places where their logits are within twice the difference.
    """
    if gap > FAR[dtype] * float(first.logits.std()):
        return "FAULT"
    return "same" if first.top()[0][0] == step.top()[0][0] else "near tie"
