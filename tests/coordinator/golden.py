"""Golden checkpoints, prompts and expected outputs, and a model over them whose routed experts run in this process."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from evrun.coordinator.engram_map import token_map
from evrun.coordinator.models.deepseek_v41.load import load_model
from evrun.coordinator.models.deepseek_v41.model import DeepseekV41
from evrun.coordinator.models.interface import DetailObserver
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.kernels.formats import dequantise_fp4_rows
from evrun.kernels.formats_torch import round_fp8

torch.set_num_threads(1)
"""As the data was made: more threads cut some sums otherwise. These models are too small to gain by them."""

ROOT = Path(__file__).parents[1] / "golden"
VARIANTS = {"fp32": ("float32", "reference"), "fp32noaq": ("float32", "weights-only"), "bf16": ("bfloat16", "reference")}
"""Folder of expected outputs -> (dtype, numerics)."""
PROMPTS = {
    "minimal": ("text", "rand-24", "one", "odd-15"),
    "full": ("chat", "mixed", "rand-61", "short-3"),
    "long": ("text-long", "rand-201", "repeat-160"),
}
DETAILED = {"minimal": "rand-24", "full": "chat"}
"""The prompt of a config that has *.layers.safetensors, in the variants bf16 and fp32noaq."""


@functools.cache
def checkpoint(name: str) -> Checkpoint:
    return Checkpoint.open(ROOT / name / "checkpoint")


@functools.cache
def model(name: str, variant: str, dense_dtype: str = "bfloat16", device: str = "cpu") -> DeepseekV41:
    return load(checkpoint(name), variant, dense_dtype, device=device)


def load(
    found: Checkpoint, variant: str, dense_dtype: str = "bfloat16", progress: Callable[[int, str], None] | None = None, device: str = "cpu"
) -> DeepseekV41:
    dtype, numerics = VARIANTS[variant]
    ids = token_map(found.directory / "tokenizer.json", found.config.vocab_size) if found.config.engram_layer_ids else None
    return load_model(
        found,
        dtype=dtype,
        numerics=numerics,
        dense_dtype=dense_dtype,
        device=device,
        token_map=ids,
        progress=progress or (lambda done, what: None),
    )


@functools.cache
def expected(name: str, variant: str, prompt: str) -> dict[str, Tensor]:
    return load_file(ROOT / name / "expected" / variant / f"{prompt}.safetensors")


@functools.cache
def expected_layers(name: str, variant: str) -> dict[str, Tensor]:
    return load_file(ROOT / name / "expected" / variant / f"{DETAILED[name]}.layers.safetensors")


@functools.cache
def greedy(name: str) -> dict:
    return json.loads((ROOT / name / "greedy.json").read_text())


class LocalExperts:
    """Routed experts of a tiny checkpoint, expanded whole and kept: separate code, for tests only (spec 3.9)."""

    def __init__(self, found: Checkpoint, variant: str) -> None:
        dtype, numerics = VARIANTS[variant]
        self._found = found
        self._round: Callable[[Tensor], Tensor] = (lambda x: x.bfloat16().float()) if dtype == "bfloat16" else lambda x: x
        self._input: Callable[[Tensor], Tensor] = round_fp8 if numerics == "reference" else lambda x: x
        self._expert = functools.cache(self._expand)

    def __call__(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Callable[[], Tensor]:
        return lambda: self.routed(layer, x.cpu(), ids.cpu(), weights.cpu())

    def routed(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        limit = self._found.config.swiglu_limit
        out = torch.zeros(x.shape)
        for expert in ids.unique().tolist():
            tokens, slots = (ids == expert).nonzero(as_tuple=True)
            w1, w3, w2 = self._expert(layer, expert)
            rows = self._input(x[tokens].float())
            gate, up = self._round(rows @ w1.T), self._round(rows @ w3.T)
            act = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
            act = self._round(weights[tokens, slots][:, None] * act)
            out[tokens] += self._round(self._input(act) @ w2.T)
        return out

    def _expand(self, layer: int, expert: int) -> list[Tensor]:
        w1, s1, w3, s3, w2, s2 = self._found.expert(layer, expert)
        return [torch.from_numpy(dequantise_fp4_rows(np.array(w.data), np.array(s.data))) for w, s in ((w1, s1), (w3, s3), (w2, s2))]


@functools.cache
def experts(name: str, variant: str) -> LocalExperts:
    return LocalExperts(checkpoint(name), variant)


class Recorder(DetailObserver):
    """Keeps everything, by the names of the expected files; rows of several calls in one tensor."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Tensor]] = {}

    def route(self, layer: int, ids: Tensor, weights: Tensor) -> None:
        self.tensor(layer, "expert_ids", ids)
        self.tensor(layer, "expert_weights", weights)

    def moe(self, layer: int, moe_in: Tensor, routed_out: Tensor) -> None:
        self.tensor(layer, "moe_in", moe_in)
        self.tensor(layer, "moe_routed_out", routed_out)

    def tensor(self, layer: int, name: str, value: Tensor) -> None:
        self._rows.setdefault(f"layers.{layer}.{name}", []).append(value.to("cpu", copy=True))

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __getitem__(self, name: str) -> Tensor:
        rows = self._rows[name]
        if name.endswith("index_topk"):  # grows with the number of entries until index_topk
            widest = max(r.shape[1] for r in rows)
            rows = [torch.nn.functional.pad(r, (0, widest - r.shape[1]), value=-1) for r in rows]
        return torch.cat(rows)


@dataclass
class Run:
    """One prompt and a continuation that was given, not chosen."""

    logits: Tensor
    """[P + G - 1, V]: after each token that was fed"""
    prefill: Recorder
    decode: Recorder


def run(name: str, variant: str, ids: Sequence[int], following: Sequence[int] = (), chunks: Sequence[int] | None = None) -> Run:
    """Prefill `ids` in pieces of the given sizes (None: one piece), then feed `following` token by token."""
    return run_on(model(name, variant), experts(name, variant), ids, following, chunks)


def run_on(
    tree: DeepseekV41, local: LocalExperts, ids: Sequence[int], following: Sequence[int] = (), chunks: Sequence[int] | None = None
) -> Run:
    state = tree.new_state(len(ids) + len(following))
    prefill, decode = Recorder(), Recorder()
    rows, start = [], 0
    for size in chunks or [len(ids)]:
        rows.append(tree.forward(ids[start : start + size], state, local, logits="all", observer=prefill))
        start += size
    assert start == len(ids)
    for token in following:
        rows.append(tree.forward([token], state, local, observer=decode))
    return Run(torch.cat(rows).cpu(), prefill, decode)


def same_sets(a: Tensor, b: Tensor) -> Tensor:
    """[T] bool: whether two rows hold the same numbers, in whatever order."""
    return (a.long().sort(-1).values == b.long().sort(-1).values).all(-1)


def relative_rms(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).square().mean().sqrt() / wanted.float().square().mean().sqrt())


def geometry(name: str) -> ModelConfig:
    return checkpoint(name).config

