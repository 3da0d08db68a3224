"""The indexer: which compressed entries a query attends to, and the candidate pool of the two-level rule (spec 3.7).

Scores exist only in pieces of SCORE_ELEMENTS; what is kept of a piece is the best ranks so far and, in the candidate
source, one maximum per block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from evrun.coordinator.models.deepseek_v41.arithmetic import Arithmetic
from evrun.coordinator.models.deepseek_v41.linear import Linear
from evrun.coordinator.models.deepseek_v41.norm import RmsNorm
from evrun.coordinator.models.deepseek_v41.rope import rotate_
from evrun.coordinator.models.deepseek_v41.selection import chosen_positions, merge, rank
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.kernels.formats_torch import round_fp4_index

SCORE_ELEMENTS = 1 << 22
"""Per-head scores (or gathered key channels) at a time: 16 MiB of fp32."""
_KEYS_AT_ONCE = 8192
"""Queries are cut before keys are cut finer than this."""


class IndexKeys:
    """Latents -> index keys. Owned by the KV sources."""

    def __init__(self, wk: Linear, norm: RmsNorm, arithmetic: Arithmetic) -> None:
        self._wk = wk
        self._norm = norm
        self._arithmetic = arithmetic

    def __call__(self, latents: Tensor, turns: Tensor) -> Tensor:
        """latents [m, d] before their own rotation, turns [m, R/2] of the groups' first tokens -> [m, index_head_dim] fp32 values."""
        keys = rotate_(self._norm(self._wk(latents.float())), turns)
        return self._arithmetic.rounded(round_fp4_index(keys.float()))


class Selection(NamedTuple):
    """What an index source publishes to the layers after it."""

    picks: Tensor
    """[T, k] int64: chosen entries, ascending, then -1; k = min(index_topk, entries so far)"""
    blocks: Tensor | None
    """[T, B] int64: candidate blocks, ascending, then -1. None: every entry is a candidate, or no pool was asked for."""


class Indexer:
    """Queries and weights of one index source, and the choice among the keys of its KV source."""

    def __init__(self, wq_b: Linear, weights_proj: Linear, config: ModelConfig, is_candidate_source: bool, arithmetic: Arithmetic) -> None:
        self._wq_b = wq_b
        self._weights_proj = weights_proj
        self._heads = config.index_n_heads
        self._scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self._topk = config.index_topk
        self._block = config.candidate_block_size
        self._pool = config.candidate_topk_blocks if is_candidate_source else 0
        self._arithmetic = arithmetic

    def __call__(
        self, x: Tensor, q_input: Tensor, turns: Tensor, keys: Tensor, visible: Tensor, longest: int, blocks: Tensor | None
    ) -> Selection:
        """Choose for T queries.

        x        [T, D] dtype: attention input; q_input [T, q_lora_rank] fp32: input of wq_b
        turns    [T, R/2] complex64 of the queries' positions
        keys     [n, index_head_dim]: every key so far, those of this call included
        visible  [T] int64: entry j is visible to a query when j < visible; longest: the largest of them
        blocks   candidates of the candidate source, when this layer is restricted to them
        """
        keys = keys[:longest]
        restricts = 0 < self._pool < -(-longest // max(self._block, 1))
        if longest <= self._topk and blocks is None and not restricts:
            positions = torch.arange(longest, device=x.device)
            return Selection(torch.where(positions < visible[:, None], positions, -1), None)
        queries, weights = self._queries(x, q_input, turns)
        picks, pool = [], []
        if blocks is None:
            step = max(1, SCORE_ELEMENTS // (self._heads * min(longest, _KEYS_AT_ONCE)))
        else:
            step = max(1, SCORE_ELEMENTS // (blocks.shape[1] * self._block * max(self._heads, keys.shape[1])))
        for start in range(0, x.shape[0], step):
            piece = slice(start, start + step)
            if blocks is None:
                best, peaks = self._scan(queries[piece], weights[piece], keys, visible[piece], restricts)
                if peaks is not None:
                    pool.append(self._candidates(peaks, visible[piece]))
            else:
                best = self._scan_blocks(queries[piece], weights[piece], keys, visible[piece], blocks[piece])
            picks.append(chosen_positions(best, min(self._topk, longest)))
        return Selection(torch.cat(picks), torch.cat(pool) if pool else None)

    def _queries(self, x: Tensor, q_input: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """[T, heads, index_head_dim] fp32 rotated and rounded, and the head weights [T, heads] fp32."""
        a = self._arithmetic
        queries = rotate_(self._wq_b(q_input).unflatten(-1, (self._heads, -1)), turns)
        weights = self._weights_proj(x.float()).float() * self._scale
        return a.rounded(round_fp4_index(queries.float())), a.rounded(weights)

    def _scan(self, queries: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, with_peaks: bool) -> tuple[Tensor, Tensor | None]:
        """Best ranks [Q, <= topk] over all keys, and the largest visible score of every block [Q, blocks]."""
        best: Tensor | None = None
        peaks = []
        step = max(1, SCORE_ELEMENTS // (self._heads * queries.shape[0]))
        if with_peaks:
            step = max(1, step // self._block) * self._block
        for start in range(0, keys.shape[0], step):
            some = keys[start : start + step].float()
            dots = queries.flatten(0, 1) @ some.T
            scores = self._weigh(dots.view(queries.shape[0], self._heads, -1), weights)
            positions = torch.arange(start, start + some.shape[0], device=keys.device)
            valid = positions < visible[:, None]
            if with_peaks:
                whole_blocks = pad(scores.masked_fill(~valid, -torch.inf), (0, -some.shape[0] % self._block), value=-torch.inf)
                peaks.append(whole_blocks.unflatten(-1, (-1, self._block)).amax(-1))
            best = merge(best, rank(scores, positions, valid), self._topk)
        assert best is not None
        return best, torch.cat(peaks, 1) if peaks else None

    def _scan_blocks(self, queries: Tensor, weights: Tensor, keys: Tensor, visible: Tensor, blocks: Tensor) -> Tensor:
        """Best ranks [Q, <= topk] over the keys of each query's own candidate blocks."""
        inside = torch.arange(self._block, device=keys.device)
        positions = (blocks[:, :, None] * self._block + inside).flatten(1)
        valid = (blocks >= 0).repeat_interleave(self._block, 1) & (positions < visible[:, None])
        some = keys[torch.where(valid, positions, 0)].float()
        scores = self._weigh(torch.bmm(queries, some.transpose(1, 2)), weights)
        return merge(None, rank(scores, positions, valid), self._topk)

    def _weigh(self, dots: Tensor, weights: Tensor) -> Tensor:
        """dots [Q, heads, n] fp32 -> scores [Q, n] fp32: sum over heads of max(0, dot) * weight, rounded where the reference rounds."""
        a = self._arithmetic
        return a.rounded(a.rounded(a.rounded(dots).relu_() * weights[..., None]).sum(1))

    def _candidates(self, peaks: Tensor, visible: Tensor) -> Tensor:
        """The best blocks of each query [Q, pool], the one with its newest visible entry always among them."""
        numbers = torch.arange(peaks.shape[1], device=peaks.device)
        newest = (visible - 1).div(self._block, rounding_mode="floor")[:, None]
        peaks = peaks.masked_fill(numbers == newest, torch.inf)
        return chosen_positions(merge(None, rank(peaks, numbers, numbers <= newest), self._pool), self._pool)


def candidate_mask(blocks: Tensor | None, visible: Tensor, entries: int, block_size: int) -> Tensor:
    """[T, entries] bool: the candidate pool, whole blocks, so also entries of the newest block that are not visible yet."""
    number = torch.arange(entries, device=visible.device) // block_size
    if blocks is None:
        return number <= (visible[:, None] - 1).div(block_size, rounding_mode="floor")
    mask = torch.zeros(blocks.shape[0], entries // block_size + 2, dtype=torch.bool, device=visible.device)
    mask.scatter_(1, blocks + 1, True)
    return mask[:, 1:][:, number]
