"""The two config layouts of the release, reduced to one table of values. Pure: a parsed JSON object in, values out.

The nested `config.json` keeps the model under `text_config`; the flat `inference/config.json` of the reference code has
other names for the same values (spec 1.2). A file is told by what it holds, not by where it lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TEXT_KEYS = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "swiglu_limit",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "compress_rope_theta",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "sliding_window",
    "compress_ratios",
    "kv_source_layer_ids",
    "index_source_layer_ids",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "candidate_source_layer_id",
    "candidate_topk_blocks",
    "candidate_block_size",
    "hc_mult",
    "hc_sinkhorn_iters",
    "hc_eps",
    "engram_layer_ids",
    "engram_num_embeddings",
    "engram_max_ngram_size",
    "engram_vocab_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_pad_token_id",
    "engram_compressed_vocab_size",
)
"""Fields of ModelConfig that stand under `text_config` by the same name."""
ROPE_KEYS = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
TOKEN_KEYS = ("bos_token_id", "eos_token_id")

FLAT_NAMES = {
    "hidden_size": "dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_experts_per_tok": "n_activated_experts",
    "routed_scaling_factor": "route_scale",
    "qk_rope_head_dim": "rope_head_dim",
    "rms_norm_eps": "norm_eps",
    "sliding_window": "window_size",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "engram_pad_token_id": "engram_pad_id",
    "rope_scaling.original_max_position_embeddings": "original_seq_len",
    "rope_scaling.factor": "rope_factor",
    "rope_scaling.beta_fast": "beta_fast",
    "rope_scaling.beta_slow": "beta_slow",
}
"""Our name -> name in the flat layout, where they differ."""

FLAT_CODE_DEFAULTS = {"rope_scaling.beta_fast": 32, "rope_scaling.beta_slow": 1}
"""What the reference code takes when its flat config is silent."""

MODEL_TYPE = "deepseek_v41"

_FIXED_TOP = {"model_type": MODEL_TYPE}
_FIXED_QUANTIZATION = {
    "quant_method": "fp8",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_FIXED_TEXT = {
    "model_type": MODEL_TYPE + "_text",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
_FIXED_TEXT_IF_PRESENT = {"attention_bias": False, "tie_word_embeddings": False}
_FIXED_FLAT = {"dtype": "fp8", "expert_dtype": "fp4", "score_func": "sqrtsoftplus"}
_FIXED_FLAT_IF_PRESENT = {
    "model_type": MODEL_TYPE,
    "scale_fmt": "ue8m0",
    "weight_block_size": [32, 32],
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}


def read(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Values by the nested layout's names (`rope_scaling.factor` and the like are dotted), and problems, one line each."""
    if isinstance(raw.get("text_config"), dict):
        return _read_nested(raw)
    if "dim" in raw:
        return _read_flat(raw)
    found = raw.get("model_type")
    problems = _fixed(raw, _FIXED_TOP, "") if found != MODEL_TYPE else []
    return {}, [*problems, "expected `text_config` (nested layout) or `dim` (flat layout), found neither: not a config of this model"]


def _read_nested(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    text = raw["text_config"]
    problems = _fixed(raw, _FIXED_TOP, "")
    quantization = raw.get("quantization_config")
    quantization = quantization if isinstance(quantization, dict) else {}
    problems += _fixed(quantization, _FIXED_QUANTIZATION, "quantization_config.")
    problems += _fixed(text, _FIXED_TEXT, "text_config.")
    problems += _fixed(text, {k: v for k, v in _FIXED_TEXT_IF_PRESENT.items() if k in text}, "text_config.")
    rope = text.get("rope_scaling")
    rope = rope if isinstance(rope, dict) else {}
    problems += _fixed(rope, {"rope_type": "yarn"}, "text_config.rope_scaling.")
    values = {k: text[k] for k in TEXT_KEYS if k in text}
    values |= {f"rope_scaling.{k}": rope[k] for k in ROPE_KEYS if k in rope}
    values |= {k: raw[k] for k in TOKEN_KEYS if k in raw}
    missing = [f"text_config.{k}" for k in TEXT_KEYS if k not in text]
    missing += [f"text_config.rope_scaling.{k}" for k in ROPE_KEYS if k not in rope]
    missing += [k for k in TOKEN_KEYS if k not in raw]
    return values, problems + _missing(missing)


def _read_flat(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    problems = _fixed(raw, _FIXED_FLAT, "")
    problems += _fixed(raw, {k: v for k, v in _FIXED_FLAT_IF_PRESENT.items() if k in raw}, "")
    wanted = [*TEXT_KEYS, *(f"rope_scaling.{k}" for k in ROPE_KEYS), *TOKEN_KEYS]
    names = {key: FLAT_NAMES.get(key, key) for key in wanted}
    values = FLAT_CODE_DEFAULTS | {key: raw[name] for key, name in names.items() if name in raw}
    factor, original = values.get("rope_scaling.factor"), values.get("rope_scaling.original_max_position_embeddings")
    if "max_position_embeddings" not in values and isinstance(factor, (int, float)) and isinstance(original, int):
        values["max_position_embeddings"] = int(factor * original)
    optional = {"max_position_embeddings", *TOKEN_KEYS}  # not part of this layout: derived, or found with the tokenizer
    return values, problems + _missing([names[k] for k in wanted if k not in values and k not in optional])


def _fixed(raw: Mapping[str, Any], expected: Mapping[str, Any], prefix: str) -> list[str]:
    problems = []
    for key, value in expected.items():
        found = raw.get(key)
        if found != value or isinstance(found, bool) != isinstance(value, bool):
            shown = f"{found!r:.80}" if key in raw else "nothing"
            problems.append(f"{prefix}{key}: expected {value!r}, found {shown}: this release format is the only one evrun serves")
    return problems


def _missing(keys: list[str]) -> list[str]:
    return [f"missing keys: {', '.join(keys)}"] if keys else []
