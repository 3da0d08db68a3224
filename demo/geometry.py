"""The demo model's sizes: the release's architecture with every structural feature, small enough for a repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evrun.coordinator.engram_map import distinct, token_map
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.launch.export import geometry

VOCAB_SIZE = 4096
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 128,
    "o_lora_rank": 32,
    "o_groups": 4,
    "max_position_embeddings": 4096,
    "rope_scaling.original_max_position_embeddings": 256,
    "n_routed_experts": 32,
    "num_experts_per_tok": 6,
    "sliding_window": 32,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 32,
    "candidate_topk_blocks": 8,
    "candidate_block_size": 8,
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 1000,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
}
"""By the names of the nested config; layer roles follow from the number of layers as in every other preset."""


def config(tokenizer_json: Path) -> ModelConfig:
    """The demo's ModelConfig for its tokenizer. Raises UsageError when the sizes do not fit together."""
    return geometry.make_config(geometry.values("small", **SIZES), distinct(token_map(tokenizer_json, VOCAB_SIZE)))
