"""Trainable tensors by the names of the checkpoint, and what they start as.

A dense weight is fp32 under its name (`layers.0.attn.wq_a.weight`); scales exist only once it is packed. The routed experts of
a layer are one tensor each for w1, w3 and w2 (`layers.0.ffn.experts.w1`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.schema import other_specs

Parameters = dict[str, Tensor]
EXPERT_WEIGHTS = ("w1", "w3", "w2")
_OWN_STREAM = 3.0
"""Start of the mixing logits on the diagonal: every stream mostly keeps its own content."""


def expert_weight(layer: int, part: str) -> str:
    return f"layers.{layer}.ffn.experts.{part}"


def start(config: ModelConfig, seed: int) -> Parameters:
    """fp32 tensors on the CPU; the same seed gives the same values."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    tensors: Parameters = {}
    # The outputs of all sublayers add up in the streams: each starts that much smaller.
    depth = 1 / math.sqrt(2 * config.num_hidden_layers)
    for name, (_, shape) in other_specs(config).items():
        if name.endswith(".scale"):
            continue
        stem = name.split(".", 2)[2] if name.startswith("layers.") else name
        if "norm" in stem or stem in ("engram.q_weight", "engram.k_weight"):
            tensors[name] = torch.ones(*shape)
        elif stem in ("ffn.gate.bias", "attn.attn_sink"):
            tensors[name] = torch.zeros(*shape)
        elif stem.endswith("_base"):
            tensors[name] = normal(*shape, std=0.3)
            tensors[name][2 * config.hc_mult :] += _OWN_STREAM * torch.eye(config.hc_mult).flatten()
        elif stem.endswith("_scale"):
            tensors[name] = torch.full(shape, 0.3)
        elif stem == "embed.weight":
            tensors[name] = normal(*shape, std=0.5)
        elif stem == "engram.embed.weight":
            tensors[name] = normal(*shape, std=0.3)
        else:
            out = stem in ("attn.wo_b.weight", "ffn.shared_experts.w2.weight", "engram.wkv.weight")
            tensors[name] = normal(*shape, std=(depth if out else 1.0) / math.sqrt(shape[1]))
    hidden, inner, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    for layer in range(config.num_hidden_layers):
        for part in EXPERT_WEIGHTS:
            shape = (experts, hidden, inner) if part == "w2" else (experts, inner, hidden)
            std = (depth if part == "w2" else 1.0) / math.sqrt(shape[2])
            tensors[expert_weight(layer, part)] = normal(*shape, std=std)
    return tensors
