"""Whether a card can serve: its kernels are tried before the plan is made, each card in a process of its own.

A context, a broken driver or a crash ends that process and not the launcher, and the compiled kernels it leaves in the
cache folder are there for the workers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.launch.config import RunConfig
from evrun.launch.devices import Card
from evrun.launch.process import Exit, child_environment

WITHIN_S = 300.0
"""The first time a compiler runs; then the kernels come from the cache."""


class Verdict(NamedTuple):
    """What came of one card's trial."""

    unfit: str
    """Why it cannot serve; empty when it can."""
    kernel: str = ""
    """Which sibling of `kernels.registry.card_names` it runs."""
    passed_over: tuple[str, ...] = ()
    """Why a preferred one does not run here, a line each."""


def try_cards(cards: Sequence[Card], config: RunConfig, model: ModelConfig, cache_dir: str) -> dict[str, Verdict]:
    """Verdicts by uuid. Cards are tried side by side."""
    started = [(card, _start(card, config, model, cache_dir)) for card in cards]
    return {card.uuid: _verdict(child) for card, child in started}


def _start(card: Card, config: RunConfig, model: ModelConfig, cache_dir: str) -> subprocess.Popen[str]:
    geometry = (model.num_experts_per_tok, model.n_routed_experts, model.hidden_size, model.moe_intermediate_size, model.swiglu_limit)
    command = [sys.executable, "-m", "evrun.expert_worker.card.trial", card.uuid, cache_dir, *map(str, geometry)]
    environment = child_environment(os.environ, 1) | {"CUDA_VISIBLE_DEVICES": card.uuid}
    return subprocess.Popen(
        [*command, config.numerics, config.dtype, config.gpu_kernel],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env=environment,
    )


def _verdict(child: subprocess.Popen[str]) -> Verdict:
    try:
        out, err = child.communicate(timeout=WITHIN_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return Verdict(f"its trial took more than {WITHIN_S:g} s")
    if child.returncode:
        words = err.strip().splitlines()
        return Verdict(f"its trial {Exit.of(child.returncode)}{': ' + words[-1] if words else ''}")
    answer, *passed_over = out.strip().splitlines() or ["its trial said nothing"]
    if not answer.startswith("ok "):
        return Verdict(answer)
    return Verdict("", answer.split()[1], tuple(passed_over))
