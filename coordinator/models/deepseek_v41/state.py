"""Decode state of one sequence (spec 4.1): everything that outlives a forward call."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from evrun.expert_worker.wire.checkpoint.config import ModelConfig

CACHE_DTYPE = torch.bfloat16
"""Cached keys are values of 4-bit and 8-bit formats times a scale: bfloat16 holds them exactly, in either `--dtype`."""


class SourceCache:
    """What the layers below the next KV source read: compressed entries and index keys, one row per finished group."""

    def __init__(self, config: ModelConfig, layer: int, max_tokens: int, device: torch.device) -> None:
        self.ratio = config.compress_ratios[layer]
        rows = max_tokens // self.ratio
        # Never zeroed: a row is written before the first read, and untouched pages take no memory.
        self.entries = torch.empty(rows, config.head_dim, dtype=CACHE_DTYPE, device=device)
        """[max_tokens // ratio, d] rotated and rounded"""
        self.keys = torch.empty(rows, config.index_head_dim, dtype=CACHE_DTYPE, device=device)
        """[max_tokens // ratio, index_head_dim] rotated and rounded"""
        self.open = torch.empty(self.ratio - 1, 2, config.head_dim, dtype=torch.float32, device=device)
        """k and g of the tokens of the group that is not complete yet: the first position % ratio rows count"""


class State:
    """One sequence. A forward call that raises leaves it half advanced: throw it away.

    Memory: `state_bytes`. The big parts are allocated here and never again.
    """

    def __init__(self, config: ModelConfig, max_tokens: int, device: torch.device) -> None:
        self.max_tokens = max_tokens
        self.position = 0
        """tokens seen so far"""
        self.windows = torch.zeros(config.num_hidden_layers, config.sliding_window, config.head_dim, dtype=CACHE_DTYPE, device=device)
        """[layers, W, d]: the last W latents of every layer, token p in slot p mod W"""
        self.sources = {layer: SourceCache(config, layer, max_tokens, device) for layer in config.kv_source_layer_ids}
        self.tail: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """compressed ids of the last engram_max_ngram_size - 1 tokens, oldest first: the Engram's look-back"""


def state_bytes(config: ModelConfig, max_tokens: int) -> int:
    """Bytes that a State takes once full. The same for every `--dtype`: see CACHE_DTYPE."""
    item = CACHE_DTYPE.itemsize
    total = config.num_hidden_layers * config.sliding_window * config.head_dim * item
    for layer in config.kv_source_layer_ids:
        ratio = config.compress_ratios[layer]
        total += max_tokens // ratio * (config.head_dim + config.index_head_dim) * item
        total += (ratio - 1) * 2 * config.head_dim * torch.float32.itemsize
    return total
