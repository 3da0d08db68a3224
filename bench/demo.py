"""The demo's questions, asked of real workers: how many are answered right, and how sure the model is of the right answers.

A question is right when the greedy continuation is its answer and then the end. Prompt, answer and end go through the model in
one piece: the greedy choice at every place of the answer is the next token of it exactly when greedy decoding gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from evrun.bench.devices import CACHE
from evrun.bench.herd import herd
from evrun.bench.report import Row
from evrun.coordinator.engram_map import cached_token_map
from evrun.coordinator.models.interface import Model
from evrun.coordinator.models.registry import load_model
from evrun.coordinator.text import Text
from evrun.demo.data.facts import Question
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint

CHUNK = 128
"""Tokens of the longest question with its answer; one layer call each."""


class Case(NamedTuple):
    """One way to run the model. `backend`: native, native-avx2, torch, ... for the CPU; `device`: cpu or cuda:UUID."""

    device: str
    backend: str
    deal: str
    world: int
    numerics: str


def run(checkpoint: Path, questions: Sequence[Question], cases: Sequence[Case]) -> list[Row]:
    """A row per case: capitals and others right of how many, mean log-probability (nats a token) of the answers and their ends."""
    opened = Checkpoint.open(checkpoint)
    models: dict[str, Model] = {}
    rows: list[Row] = []
    for case in cases:
        if case.numerics not in models:
            models[case.numerics] = _load(opened, case.numerics)
        options: dict[str, Any] = {"backend": case.backend, "deal": case.deal, "numerics": case.numerics}
        options |= {"combine": "partial", "chunk": CHUNK}
        with herd(checkpoint, case.world, devices=[case.device] * case.world, **options) as workers:
            answers = [_ask(models[case.numerics], workers.experts, opened, question) for question in questions]
        capitals = [right for (right, _), q in zip(answers, questions, strict=True) if q.kind == "capital"]
        others = [right for (right, _), q in zip(answers, questions, strict=True) if q.kind != "capital"]
        sure = torch.cat([log_probabilities for _, log_probabilities in answers])
        rows.append(
            {
                **case._asdict(),
                "capitals_right": sum(capitals),
                "capitals": len(capitals),
                "others_right": sum(others),
                "others": len(others),
                "mean_log_probability": float(sure.mean()),
            }
        )
    return rows


def _load(opened: Checkpoint, numerics: str) -> Model:
    ids = cached_token_map(opened.directory, opened.config, str(CACHE)) if opened.config.engram_layer_ids else None
    return load_model(
        opened, dtype="bfloat16", numerics=numerics, dense_dtype="bfloat16", device="cpu", token_map=ids, progress=lambda done, what: None
    )


def _ask(model: Model, experts: Any, opened: Checkpoint, question: Question) -> tuple[bool, torch.Tensor]:
    """Whether it is answered right, and the log-probability of each token of the right answer, its end included."""
    config = opened.config
    text = Text(opened.directory, config.bos_token_id)
    prompt = text.encode(question.prompt, add_bos=True)
    answer = [*text.encode(question.answer, add_bos=False), config.eos_token_id]
    fed = [*prompt, *answer[:-1]]
    logits = model.forward(fed, model.new_state(len(fed)), experts, logits="all")[len(prompt) - 1 :].float()
    wanted = torch.tensor(answer)
    return bool((logits.argmax(1) == wanted).all()), logits.log_softmax(1)[torch.arange(len(answer)), wanted]
