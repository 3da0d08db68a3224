"""How fast this process runs the dense tree of a geometry: a few layers of full width with random weights, timed by part."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evrun.coordinator.models.registry import load_model
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.dtypes import ITEM_BYTES
from evrun.expert_worker.wire.checkpoint.reader import Tensor
from evrun.expert_worker.wire.checkpoint.schema import is_skipped, other_specs
from evrun.launch.doctor.rates import Rate

LARGEST_VOCABULARY = 16384
"""The head's rate does not depend on its length."""
PASSES = (16, 64)
REPEATS = 3
ENOUGH_S = 0.8
"""No further repetition after this."""
PARTS = ("attention", "shared", "head")


def few_layers(config: ModelConfig) -> ModelConfig:
    """The geometry cut to two layers of its commonest compress ratio, without Engram: a KV source, and one that reads it."""
    ((ratio, _),) = Counter(config.compress_ratios).most_common(1)
    sources = (0,) if ratio else ()
    vocabulary = min(config.vocab_size, LARGEST_VOCABULARY)
    return dataclasses.replace(
        config, num_hidden_layers=2, compress_ratios=(ratio, ratio), kv_source_layer_ids=sources, index_source_layer_ids=sources,
        candidate_source_layer_id=-1, engram_layer_ids=(), engram_num_embeddings=(), vocab_size=vocabulary,
        bos_token_id=min(config.bos_token_id, vocabulary - 1), eos_token_id=min(config.eos_token_id, vocabulary - 1),
    )  # fmt: skip


class RandomCheckpoint:
    """What a model is loaded from: tensors of a geometry's names and shapes with ordinary values, made when asked for."""

    directory = Path()

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._specs = {name: spec for name, spec in other_specs(config).items() if not is_skipped(name)}
        random = np.random.default_rng(0)
        self._values = random.standard_normal(1 << 20).astype(np.float32) / 32
        # Both signs, no subnormals: trained weights have next to none, and expanding them is many times slower.
        self._codes = random.integers(8, 127, 1 << 20, dtype=np.uint8) | (random.integers(0, 2, 1 << 20, dtype=np.uint8) << 7)

    def tensor(self, name: str) -> Tensor:
        dtype, shape = self._specs[name]
        size = ITEM_BYTES[dtype] * math.prod(shape)
        if dtype == "F8_E8M0":
            data = np.full(size, 118, np.uint8)
        elif dtype == "F8_E4M3":
            data = np.resize(self._codes, size)
        else:
            values = np.resize(self._values, math.prod(shape))
            data = values.view(np.uint8) if dtype == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return Tensor(name, dtype, shape, Path("random"), 0, data.reshape(*shape[:-1], -1))


class Stopwatch:
    """Takes the place of the routed experts: their hand-out and their collection cut a forward call into its parts."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.attention: list[float] = []
        """Seconds of each layer until its experts are handed out, from the collection of the layer before."""
        self.shared = self.head = 0.0
        self._at = time.perf_counter()

    def end(self) -> None:
        self.head = self._lap()

    def __call__(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.attention.append(self._lap())

        def collect() -> torch.Tensor:
            self.shared += self._lap()
            return torch.zeros(x.shape, dtype=torch.float32)

        return collect

    def seconds(self, config: ModelConfig) -> dict[str, float]:
        """By part, for all layers of the whole geometry; the head for the few tokens of its vocabulary that there are."""
        layers, sources = config.num_hidden_layers, len(config.kv_source_layer_ids)
        source, other = self.attention
        return {"attention": sources * source + (layers - sources) * other, "shared": layers / 2 * self.shared, "head": self.head}

    def _lap(self) -> float:
        now = time.perf_counter()
        lap, self._at = now - self._at, now
        return lap


def part_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes of weights that a token reads, by part, without Engram; the embedding is only looked up in."""
    sizes = dict.fromkeys(PARTS, 0)
    for name, (dtype, shape) in other_specs(config).items():
        if is_skipped(name) or name == "embed.weight" or ".engram." in name:
            continue
        part = "head" if name == "head.weight" else "shared" if ".shared_experts." in name else "attention"
        sizes[part] += ITEM_BYTES[dtype] * math.prod(shape)
    return sizes


def measure(config: ModelConfig, numerics: str, dtype: str, dense_dtype: str, context: int, threads: int) -> dict[str, Rate]:
    """Rate by part, at position `context` of a sequence."""
    torch.set_num_threads(threads)
    few = few_layers(config)
    model = load_model(
        RandomCheckpoint(few),  # type: ignore[arg-type]
        dtype=dtype, numerics=numerics, dense_dtype=dense_dtype, device="cpu", token_map=None, progress=lambda done, what: None,
    )  # fmt: skip
    seconds = {tokens: _least(model, few, config, tokens, context) for tokens in (1, *PASSES)}
    sizes = part_bytes(config) | {"head": part_bytes(few)["head"]}
    first, second = PASSES
    return {p: Rate.fit(sizes[p], seconds[1][p], (first, seconds[first][p]), (second, seconds[second][p])) for p in PARTS}


def _least(model: Any, few: ModelConfig, config: ModelConfig, tokens: int, context: int) -> dict[str, float]:
    """Seconds by part of a forward call, the least of some; single tokens come first and warm up for the rest."""
    state = model.new_state(context + (REPEATS + 1) * tokens)
    for source in state.sources.values():
        for values in (source.entries, source.keys, source.open):
            values.fill_(0.01)
    state.position = context
    ids = (np.arange(tokens) % few.vocab_size).tolist()
    laps: list[dict[str, float]] = []
    watch = Stopwatch()
    until = time.perf_counter() + ENOUGH_S
    with torch.inference_mode():
        while len(laps) < (2 if tokens == 1 else 1) or (len(laps) <= REPEATS and time.perf_counter() < until):
            watch.begin()
            model.forward(ids, state, watch)
            watch.end()
            laps.append(watch.seconds(config))
    return {part: min(lap[part] for lap in laps) for part in PARTS}
