"""Random weights with sane statistics: logits of std 2-3, well spread expert choice, streams of ordinary size.

Every tensor has its own generator, seeded with (seed, name): its bytes depend neither on the shard nor on the order.
Codes are drawn as raw bits: E2M1 codes uniformly, E4M3 codes through a table of normal quantiles; the scales
then set the wanted size, as a mixture of two neighbouring powers of two. No NaN code and no E8M0 byte 255 occurs.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.header import Spec

PIECE_BYTES = 4 << 20
U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

E2M1_UNIFORM_STD = math.sqrt((0 + 0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)
E4M3_STD = 120.0
"""Standard deviation of the E4M3 codes' values, so that the rare ones reach towards the largest, 448."""


class Recipe(NamedTuple):
    """Wanted statistics. `gain` tensors get std gain / sqrt(columns), the others `std` around `mean`."""

    gain: float = 0.0
    mean: float = 0.0
    std: float = 0.0


_RECIPES: dict[str, Recipe] = {
    "embed": Recipe(std=1.0),
    "head": Recipe(gain=2.5),
    "norm": Recipe(mean=1.0, std=0.2),
    "attn_norm": Recipe(mean=0.8, std=0.16),
    "ffn_norm": Recipe(mean=0.8, std=0.16),
    "hc_attn_fn": Recipe(gain=1.0),
    "hc_ffn_fn": Recipe(gain=1.0),
    "hc_attn_scale": Recipe(mean=0.6, std=0.08),
    "hc_ffn_scale": Recipe(mean=0.6, std=0.08),
    "attn.q_norm": Recipe(mean=1.0, std=0.2),
    "attn.kv_norm": Recipe(mean=1.0, std=0.2),
    "attn.wq_a": Recipe(gain=1.05),
    "attn.wq_b": Recipe(gain=1.7),
    "attn.wkv": Recipe(gain=1.05),
    "attn.wo_a": Recipe(gain=1.05),
    "attn.wo_b": Recipe(gain=0.11),
    "attn.attn_sink": Recipe(std=0.6),
    "attn.compressor.wkv": Recipe(gain=1.0),
    "attn.compressor.wgate": Recipe(gain=1.5),
    "attn.compressor.norm": Recipe(mean=1.0, std=0.2),
    "attn.indexer.wk": Recipe(gain=1.0),
    "attn.indexer.k_norm": Recipe(mean=1.0, std=0.2),
    "attn.indexer.wq_b": Recipe(gain=1.7),
    "attn.indexer.weights_proj": Recipe(gain=1.5),
    "ffn.gate": Recipe(gain=2.0),
    "ffn.gate.bias": Recipe(std=0.15),
    "ffn.shared_experts.w1": Recipe(gain=1.6),
    "ffn.shared_experts.w3": Recipe(gain=1.6),
    "ffn.shared_experts.w2": Recipe(gain=0.11),
    "ffn.experts.w1": Recipe(gain=1.5),
    "ffn.experts.w3": Recipe(gain=1.5),
    "ffn.experts.w2": Recipe(gain=0.23),
    "engram.embed": Recipe(std=1.1),
    "engram.wkv": Recipe(gain=0.27),
    "engram.q_weight": Recipe(mean=1.0, std=0.3),
    "engram.k_weight": Recipe(mean=1.0, std=0.3),
}
"""By name without layer, expert and `.weight` / `.scale`."""


class RandomWeights:
    """Payload of every tensor of one geometry and seed."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._config = config
        self._seed = seed

    def __call__(self, name: str, spec: Spec) -> Iterator[npt.NDArray[Any]]:
        """The tensor's bytes in order, in C-contiguous pieces of at most PIECE_BYTES (scales and small tensors: one piece)."""
        dtype, shape = spec
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        rng = np.random.Generator(np.random.SFC64(int.from_bytes(digest[:16], "little")))
        stem = _stem(name)
        if stem in ("hc_attn_base", "hc_ffn_base"):
            yield _mix_base(rng, self._config.hc_mult)
            return
        recipe = _RECIPES[stem]
        count = math.prod(shape)
        if dtype == "I8":
            yield from _bits(rng, count)
        elif dtype == "F8_E4M3":
            pairs = _e4m3_pairs()
            for piece in _bits(rng, count):
                yield pairs[piece.view(np.uint16)]
        elif dtype == "F8_E8M0":
            columns = self._columns(stem)
            std = recipe.gain / math.sqrt(columns) if recipe.gain else recipe.std
            code_std = E2M1_UNIFORM_STD if stem.startswith("ffn.experts.") else E4M3_STD
            yield from _scales(rng, count, std / code_std)
        else:
            std = recipe.gain / math.sqrt(shape[-1]) if recipe.gain else recipe.std
            if dtype == "F32":
                yield rng.standard_normal(count, np.float32) * np.float32(std) + np.float32(recipe.mean)
            else:
                quantiles = _bf16(_normal_quantiles(1 << 16) * np.float32(std) + np.float32(recipe.mean))
                for piece in _bits(rng, 2 * count):
                    yield quantiles[piece.view(np.uint16)]

    def _columns(self, stem: str) -> int:
        """Columns of the weight that a scale belongs to: what its row sums run over."""
        c = self._config
        return {
            "attn.wq_a": c.hidden_size,
            "attn.wkv": c.hidden_size,
            "attn.wq_b": c.q_lora_rank,
            "attn.indexer.wq_b": c.q_lora_rank,
            "attn.wo_a": c.num_attention_heads * c.head_dim // c.o_groups,
            "attn.wo_b": c.o_groups * c.o_lora_rank,
            "ffn.shared_experts.w2": c.moe_intermediate_size,
            "ffn.experts.w2": c.moe_intermediate_size,
            "engram.wkv": (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim,
        }.get(stem, c.hidden_size)


def _stem(name: str) -> str:
    fields = [f for f in name.split(".") if not f.isdecimal() and f not in ("layers", "weight", "scale")]
    return ".".join(fields)


def _bits(rng: np.random.Generator, count: int) -> Iterator[U8]:
    """`count` random bytes, in pieces."""
    for start in range(0, count, PIECE_BYTES):
        size = min(PIECE_BYTES, count - start)
        words = rng.integers(0, 1 << 64, -(-size // 8), dtype=np.uint64)
        yield words.view(np.uint8)[:size]


def _scales(rng: np.random.Generator, count: int, size: float) -> Iterator[U8]:
    """E8M0 bytes whose mean square is size squared: one power of two, now and then the next."""
    exponent = math.floor(math.log2(size))
    upper = ((size / 2.0**exponent) ** 2 - 1) / 3
    threshold = round(upper * 255)
    for piece in _bits(rng, count):
        yield (127 + exponent + (piece < threshold)).astype(np.uint8)


def _mix_base(rng: np.random.Generator, streams: int) -> F32:
    """Bias of the hyper-connection mix: every stream mostly keeps its own content (spec 3.3)."""
    own = np.eye(streams, dtype=np.float32).reshape(-1) * np.float32(1.5)
    base = np.concatenate([np.full(streams, -0.3, np.float32), np.zeros(streams, np.float32), own])
    spread: F32 = base + rng.standard_normal(base.size, np.float32) * np.float32(0.35)
    return spread


@functools.cache
def _normal_quantiles(count: int) -> F32:
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)], np.float32)


@functools.cache
def _e4m3_pairs() -> npt.NDArray[np.uint16]:
    """Two random bytes -> two codes: one look-up of twice the width is three times as fast."""
    table = _e4m3_table()
    pairs = np.stack(np.broadcast_arrays(table[None, :], table[:, None]), -1)
    return np.ascontiguousarray(pairs).view(np.uint16).reshape(-1)


@functools.cache
def _e4m3_table() -> U8:
    """Random byte -> E4M3 code, normally distributed; never a NaN code."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    magnitudes = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    wanted = _normal_quantiles(256) * E4M3_STD
    nearest = np.abs(magnitudes[None] - np.abs(wanted)[:, None]).argmin(1)
    table: U8 = (nearest + np.where(wanted < 0, 128, 0)).astype(np.uint8)
    return table


def _bf16(x: F32) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bfloat16 (ties to even) of finite values."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
