"""Geometries by name and by option, completed to a ModelConfig that passes every check of the reader. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from evrun.coordinator.engram_hash import raw_moduli
from evrun.expert_worker.wire.checkpoint.config import ModelConfig, RopeScaling, build
from evrun.expert_worker.wire.errors import UsageError
from evrun.launch.export import schedule

_COMMON: dict[str, Any] = {
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling.factor": 16.0,
    "rope_scaling.beta_fast": 32.0,
    "rope_scaling.beta_slow": 1.0,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_RELEASE: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 5120,
    "moe_intermediate_size": 2304,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "max_position_embeddings": 1048576,
    "rope_scaling.original_max_position_embeddings": 65536,
    "n_routed_experts": 384,
    "num_experts_per_tok": 6,
    "sliding_window": 128,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
}

_TINY: dict[str, Any] = {
    "vocab_size": 352,
    "hidden_size": 96,
    "moe_intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 10,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 128,
    "o_lora_rank": 144,
    "o_groups": 2,
    "max_position_embeddings": 4096,
    "rope_scaling.original_max_position_embeddings": 256,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "sliding_window": 8,
    "index_n_heads": 7,
    "index_head_dim": 32,
    "index_topk": 9,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 60,
    "engram_n_heads": 3,
    "engram_head_dim": 32,
}

_SMALL = _TINY | {
    "vocab_size": 4096,
    "hidden_size": 512,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 256,
    "o_lora_rank": 96,
    "o_groups": 4,
    "n_routed_experts": 48,
    "num_experts_per_tok": 6,
    "sliding_window": 64,
    "index_topk": 64,
    "candidate_topk_blocks": 16,
    "candidate_block_size": 8,
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 5000,
    "engram_n_heads": 4,
    "engram_head_dim": 64,
}

_FULL_ROWS = _SMALL | {
    "vocab_size": 2048,
    "hidden_size": 5120,
    "moe_intermediate_size": 2304,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "n_routed_experts": 12,
    "num_experts_per_tok": 6,
}

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("6 layers, 12 experts of 96 x 160, no two sizes equal: for tests, 4 MB", _COMMON | _TINY),
    "small": ("12 layers, 48 experts of 512 x 384: for trying things out, 0.2 GB", _COMMON | _SMALL),
    "full-rows": (
        "2 layers, 12 experts of the release's 5120 x 2304, the rest small: for kernels and transport, 0.7 GB",
        _COMMON | _FULL_ROWS,
    ),
    "release": ("the release's own geometry: 40 layers, 384 experts, Engram: 501 GB", _COMMON | _RELEASE),
}
"""Name -> (what it is for, values by the names of the nested config)."""


def values(preset: str = "tiny", **overrides: Any) -> dict[str, Any]:
    """Values by the names of the nested config; what neither preset nor overrides give is derived.

    overrides: fields of ModelConfig, or dotted names of its rope_scaling; None counts as not given. Ratios without sources
    get one KV source at the start of every run of equal ratios. Raises UsageError for an unknown name.
    """
    given = {k: v for k, v in overrides.items() if v is not None}
    known = {f.name for f in dataclasses.fields(ModelConfig)} | {f"rope_scaling.{f.name}" for f in dataclasses.fields(RopeScaling)}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise UsageError(f"unknown geometry option {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    if preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}; known: {', '.join(PRESETS)}")
    found = PRESETS[preset][1] | given
    layers = found["num_hidden_layers"]
    roles = schedule.derive(layers) if type(layers) is int and layers > 0 else schedule.sources(())
    if "compress_ratios" in given:
        engram = roles.engram_layer_ids
        roles = dataclasses.replace(schedule.sources(tuple(given["compress_ratios"])), engram_layer_ids=engram)
    found = dataclasses.asdict(roles) | found
    if "kv_source_layer_ids" in given and "index_source_layer_ids" not in given:
        found["index_source_layer_ids"] = found["kv_source_layer_ids"]
        found["candidate_source_layer_id"] = given.get("candidate_source_layer_id", -1)
    return found


def make_config(found: Mapping[str, Any], compressed_vocab_size: int) -> ModelConfig:
    """ModelConfig of `values`, with table sizes from the hash moduli. Raises UsageError with everything that does not fit.

    compressed_vocab_size: distinct values of the tokenizer's token map.
    """
    complete = dict(found)
    rows, order, heads = (complete.get(k) for k in ("engram_vocab_size", "engram_max_ngram_size", "engram_n_heads"))
    if type(rows) is int and type(order) is int and type(heads) is int and rows > 0:
        moduli = raw_moduli(rows, order, heads, len(complete["engram_layer_ids"]))
        complete.setdefault("engram_num_embeddings", tuple(int(m.sum()) for m in moduli))
    complete.setdefault("engram_num_embeddings", ())
    complete["engram_compressed_vocab_size"] = compressed_vocab_size
    config, problems = build(complete)
    if config is None:
        raise UsageError(f"this geometry is not possible: {'; '.join(problems)}")
    return config
