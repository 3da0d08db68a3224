"""Attention of one layer in its three modes: window only, reuse of a selection, and index source (spec 1.3, 3.5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evrun.coordinator.models.deepseek_v41.arithmetic import Arithmetic
from evrun.coordinator.models.deepseek_v41.compressor import KvSource
from evrun.coordinator.models.deepseek_v41.indexer import Indexer, candidate_mask
from evrun.coordinator.models.deepseek_v41.linear import GroupedLinear, Linear
from evrun.coordinator.models.deepseek_v41.norm import RmsNorm
from evrun.coordinator.models.deepseek_v41.rope import rotate_
from evrun.coordinator.models.deepseek_v41.sparse_attention import attend
from evrun.coordinator.models.deepseek_v41.state import CACHE_DTYPE
from evrun.coordinator.models.deepseek_v41.step import Step
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.kernels.formats_torch import round_fp8


@dataclass(frozen=True)
class AttentionWeights:
    """The projections that every layer has."""

    wq_a: Linear
    q_norm: RmsNorm
    wq_b: Linear
    wkv: Linear
    kv_norm: RmsNorm
    wo_a: GroupedLinear
    wo_b: Linear
    sink: Tensor
    """[H] fp32"""


class Attention:
    """One layer. `kv_source` and `indexer` are there only in the layers that own one."""

    def __init__(
        self,
        layer: int,
        weights: AttentionWeights,
        config: ModelConfig,
        kv_source: KvSource | None,
        indexer: Indexer | None,
        arithmetic: Arithmetic,
    ) -> None:
        self._layer = layer
        self._weights = weights
        self._heads = config.num_attention_heads
        self._scale = config.head_dim**-0.5
        self._ratio = config.compress_ratios[layer]
        self._source = config.kv_source(layer) if self._ratio else -1
        self._kv_source = kv_source
        self.indexer = indexer
        self._is_candidate_source = layer == config.candidate_source_layer_id
        self._candidate_block = config.candidate_block_size
        self._arithmetic = arithmetic

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [T, D] dtype, normalised -> [T, D] dtype. Advances the window, and the cache of a KV source."""
        w, a = self._weights, self._arithmetic
        turns = step.compressed_turns if self._ratio else step.window_turns
        x_input = a.linear_input(x)
        q_input = a.linear_input(w.q_norm(w.wq_a(x_input)))
        q = rotate_(w.wq_b(q_input).unflatten(-1, (self._heads, -1)), turns)
        kv = round_fp8(rotate_(w.kv_norm(w.wkv(x_input)), turns).float()).to(CACHE_DTYPE)
        recent = self._advance_window(kv, step)
        entries = recent
        picks = step.positions.new_empty(step.tokens, 0)
        if self._ratio:
            cache = step.state.sources[self._source]
            if self._kv_source:
                self._kv_source.append(x, cache, step.start)
            if self.indexer:
                self._select(x, q_input, step)
            if step.selection is not None:
                entries, picks = cache.entries, step.selection.picks
        out = attend(q, recent, step.window_rows, step.in_window, entries, picks, w.sink, self._scale, a)
        out = w.wo_a(rotate_(out, turns.conj()).flatten(1).float())
        return w.wo_b(a.linear_input(out))

    def _advance_window(self, kv: Tensor, step: Step) -> Tensor:
        """Latents [T, d] of this call into the ring -> [W - 1 + T, d] with those of the positions before, in position order."""
        ring = step.state.windows[self._layer]
        recent = torch.cat((ring[step.before_slots], kv))
        ring[step.kept_slots] = kv[step.tokens - step.kept :]
        return recent

    def _select(self, x: Tensor, q_input: Tensor, step: Step) -> None:
        """Publish this layer's choice. Always among the keys of its own KV source, new ones of this call included (spec 4.3)."""
        assert self.indexer is not None
        longest = step.entries(self._ratio)
        if not longest:
            step.selection = None
            return
        visible = step.visible(self._ratio)
        keys = step.state.sources[self._source].keys
        step.selection = self.indexer(x, q_input, step.compressed_turns, keys, visible, longest, step.candidate_blocks)
        if self._is_candidate_source:
            step.candidate_blocks = step.selection.blocks
        if step.details:
            step.details.tensor(self._layer, "index_topk", step.selection.picks)
            if self._is_candidate_source:
                mask = candidate_mask(step.selection.blocks, visible, longest, self._candidate_block)
                step.details.tensor(self._layer, "candidate_mask", mask)
