"""The JSON files of a checkpoint, from a ModelConfig: both config layouts and the index. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.layouts import FLAT_NAMES, MODEL_TYPE, TEXT_KEYS, TOKEN_KEYS

_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_NO_DRAFTS = {
    "num_nextn_predict_layers": 0,
    "dspark_block_size": 0,
    "dspark_noise_token_id": 0,
    "dspark_target_layer_ids": [],
    "dspark_markov_rank": 0,
    "dspark_n_routed_experts": 0,
    "dspark_num_experts_per_tok": 0,
}


def nested(config: ModelConfig, image_token_id: int) -> str:
    """config.json as the release has it, without vision and draft layers."""
    text = {"model_type": MODEL_TYPE + "_text", **{key: getattr(config, key) for key in TEXT_KEYS}}
    text |= {
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "yarn", **dataclasses.asdict(config.rope_scaling)},
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        **_NO_DRAFTS,
    }
    document = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": MODEL_TYPE,
        "dtype": "bfloat16",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.engram_pad_token_id,
        "image_token_id": image_token_id,
        "quantization_config": _QUANTIZATION,
        "text_config": text,
        "transformers_version": "5.6.0",
    }
    return json.dumps(document, indent=2)


def flat(config: ModelConfig) -> str:
    """inference/config.json: the reference code's names for the same values. It has no token ids."""
    plain: dict[str, Any] = {key: getattr(config, key) for key in TEXT_KEYS if key not in TOKEN_KEYS}
    del plain["max_position_embeddings"]
    plain |= {f"rope_scaling.{key}": value for key, value in dataclasses.asdict(config.rope_scaling).items()}
    document = {FLAT_NAMES.get(key, key): value for key, value in plain.items()}
    return json.dumps(document | {"score_func": "sqrtsoftplus", "dtype": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4"}, indent=2)


def index(weight_map: Mapping[str, str], total_bytes: int) -> str:
    """model.safetensors.index.json."""
    return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
