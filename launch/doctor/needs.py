"""Memory that a plan takes on the host, in bytes by what takes it. Pure."""

from __future__ import annotations

import math

from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.dtypes import ITEM_BYTES
from evrun.expert_worker.wire.checkpoint.schema import is_engram_table, other_specs
from evrun.launch.plan import Plan

COORDINATOR_BYTES = 350 << 20
"""A process with torch, before it loads anything."""
CPU_WORKER_BYTES = 80 << 20
CARD_WORKER_BYTES = 600 << 20
"""With a CUDA context and pinned pieces."""
WORKING_BYTES_PER_TOKEN = 460_000
"""Of a prefill piece in the coordinator, at the release's width: 0.22 GiB for 512 tokens, measured."""
CACHE_ITEM_BYTES = 2
"""Cached keys are bfloat16 whatever the run's dtype."""


def needs(plan: Plan, config: ModelConfig) -> dict[str, int]:
    """Everything but the routed experts, which the page cache holds as far as it can."""
    on_cards = sum(seat.device != "cpu" for seat in plan.ranks)
    cpu_workers = plan.world - on_cards
    return {
        "dense tree": dense_bytes(config, plan.config.dense_dtype),
        "processes": COORDINATOR_BYTES + cpu_workers * CPU_WORKER_BYTES + on_cards * CARD_WORKER_BYTES,
        "prefill piece": plan.prefill_chunk * WORKING_BYTES_PER_TOKEN * config.hidden_size // 5120,
        "slots": plan.layout.call_bytes + plan.world * plan.layout.reply_bytes,
        "decode state": state_bytes(config, plan.max_context),
    }


def dense_bytes(config: ModelConfig, dense_dtype: str) -> int:
    """The dense tree as the coordinator holds it: embedding and Engram tables stay in the page cache, scales and small BF16
    tensors become fp32, and with `bfloat16` each fp8 weight takes a second byte."""
    total = 0
    for name, (dtype, shape) in other_specs(config).items():
        size = ITEM_BYTES[dtype] * math.prod(shape)
        if name == "embed.weight" or is_engram_table(name):
            continue
        if dtype == "F8_E8M0":
            size *= 4
        elif (dtype == "BF16" and name != "head.weight") or (dtype == "F8_E4M3" and dense_dtype == "bfloat16"):
            size *= 2
        total += size
    return total


def state_bytes(config: ModelConfig, max_tokens: int) -> int:
    """Decode state of one sequence of that length (spec 4.1)."""
    total = config.num_hidden_layers * config.sliding_window * config.head_dim * CACHE_ITEM_BYTES
    for layer in config.kv_source_layer_ids:
        total += max_tokens // config.compress_ratios[layer] * (config.head_dim + config.index_head_dim) * CACHE_ITEM_BYTES
    return total
