"""Attention of one layer for whole sequences at once: window, compressed entries, selection, sink (docs/model.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from evrun.coordinator.models.deepseek_v41.rope import compressed_frequencies, rotation, window_frequencies
from evrun.coordinator.models.deepseek_v41.selection import ABSENT, rank
from evrun.demo.arithmetic import Arithmetic, quantised
from evrun.demo.parameters import Parameters
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.kernels.formats_torch import round_fp4_index, round_fp4_kv, round_fp8


@dataclass
class Shared:
    """What the layers of one forward pass hand on."""

    window_turns: Tensor
    compressed_turns: Tensor
    """[S, R/2] complex64"""
    entries: Tensor | None = None
    """[B, n, d] of the newest KV source"""
    keys: Tensor | None = None
    """[B, n, index_head_dim] of the same"""
    chosen: Tensor | None = None
    """[B, S, n] bool: the selection of the newest index source, visible entries only"""
    candidates: Tensor | None = None
    """[B, S, n] bool of the candidate source"""
    index_losses: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, config: ModelConfig, length: int, device: torch.device) -> Shared:
        positions = torch.arange(length, device=device)
        window, compressed = (rotation(positions, f(config).to(device)) for f in (window_frequencies, compressed_frequencies))
        return cls(window, compressed)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """[..., D] of any float dtype -> dtype; weight fp32."""
    x = x.float()
    return (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(dtype)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """The last channels of x [B, S, ..., D] turned by turns [S, R/2]."""
    width = 2 * turns.shape[-1]
    turns = turns.view(1, turns.shape[0], *([1] * (x.dim() - 3)), turns.shape[1])
    pairs = torch.view_as_complex(x[..., -width:].float().unflatten(-1, (-1, 2)).contiguous())
    return torch.cat((x[..., :-width], torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)), -1)


def weigh(
    window: Tensor, in_window: Tensor, entries: Tensor | None, chosen: Tensor | None, values: Tensor, sink: Tensor, dtype: torch.dtype
) -> Tensor:
    """One softmax over window, chosen entries and sink, and the weighted values.

    window   [B, H, S, S] fp32 scores, in_window [S, S] bool
    entries  [B, H, S, n] fp32 scores, chosen [B, S, n] bool; or both None
    values   [B, S + n, d]; sink [H] takes part with no value
    Returns [B, S, H, d] dtype.
    """
    parts = [window.masked_fill(~in_window, -torch.inf)]
    if entries is not None and chosen is not None:
        parts.append(entries.masked_fill(~chosen[:, None], -torch.inf))
    scores = torch.cat(parts, -1)
    peak = torch.maximum(scores.detach().amax(-1, keepdim=True), sink.detach()[:, None, None])
    weights = (scores - peak).exp()
    weights = weights / (weights.sum(-1, keepdim=True) + (sink[:, None, None] - peak).exp())
    weighted = weights.to(dtype).flatten(1, 2) @ values
    out: Tensor = weighted.unflatten(1, (scores.shape[1], -1)).transpose(1, 2)
    return out


class Attention:
    """One layer's part. Works on x [B, S, D] dtype, normalised."""

    def __init__(self, layer: int, config: ModelConfig, arithmetic: Arithmetic, weigh: Callable[..., Tensor]) -> None:
        """weigh: the function of that name, maybe compiled."""
        self._layer = layer
        self._weigh = weigh
        self._config = config
        self._arithmetic = arithmetic
        self._ratio = config.compress_ratios[layer]

    def __call__(self, x: Tensor, p: Parameters, shared: Shared) -> Tensor:
        """p: the parameters of this layer, names without `layers.N.`. -> [B, S, D] dtype."""
        c, a = self._config, self._arithmetic
        turns = shared.compressed_turns if self._ratio else shared.window_turns
        x_input = a.input(x)
        q_low = self._norm(x_input @ a.dense(p["attn.wq_a.weight"]).T, p["attn.q_norm.weight"])
        q_input = a.input(q_low)
        q = rotate((q_input @ a.dense(p["attn.wq_b.weight"]).T).unflatten(-1, (c.num_attention_heads, -1)), turns)
        kv = self._norm(x_input @ a.dense(p["attn.wkv.weight"]).T, p["attn.kv_norm.weight"])
        kv = quantised(round_fp8, rotate(kv, turns))
        if self._layer in c.kv_source_layer_ids:
            self._compress(x, p, shared)
        positions = torch.arange(x.shape[1], device=x.device)
        behind = positions[:, None] - positions
        in_window = (behind >= 0) & (behind < c.sliding_window)
        # Scaled here instead of the scores, which are many more.
        scaled = q.float() * c.head_dim**-0.5
        entry_scores, values = None, kv
        if self._ratio and shared.entries is not None:
            entry_scores = _scores(scaled, shared.entries)
            if self._layer in c.index_source_layer_ids:
                self._select(x, q_input, entry_scores, p, shared)
            values = torch.cat((kv, shared.entries), 1)
        chosen = shared.chosen if self._ratio else None
        out = self._weigh(_scores(scaled, kv), in_window, entry_scores, chosen, values, p["attn.attn_sink"], a.dtype)
        out = rotate(out, turns.conj()).flatten(2)
        grouped = out.unflatten(-1, (c.o_groups, -1))
        low = torch.einsum("bsgk,gnk->bsgn", grouped, a.dense(p["attn.wo_a.weight"]).unflatten(0, (c.o_groups, -1))).flatten(2)
        return a.input(low) @ a.dense(p["attn.wo_b.weight"]).T

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, self._arithmetic.plain(weight), self._config.rms_norm_eps, self._arithmetic.dtype)

    def _compress(self, x: Tensor, p: Parameters, shared: Shared) -> None:
        """Latents of whole groups: entries for attention, keys for the indexer."""
        a, ratio = self._arithmetic, self._ratio
        x = x[:, : x.shape[1] // ratio * ratio].float()
        latent = x @ a.plain(p["attn.compressor.wkv.weight"]).T
        if ratio > 1:
            gates = x @ a.plain(p["attn.compressor.wgate.weight"]).T
            groups, weights = latent.unflatten(1, (-1, ratio)), gates.unflatten(1, (-1, ratio)).softmax(2)
            latent = (groups * weights).sum(2)
        latent = self._norm(latent.to(a.dtype), p["attn.compressor.norm.weight"])
        turns = shared.compressed_turns[: x.shape[1] : ratio]
        shared.entries = quantised(round_fp4_kv, rotate(latent, turns))
        # The indexer learns from its own loss alone and does not pull at what it reads.
        keys = self._norm((latent.detach().float() @ a.plain(p["attn.indexer.wk.weight"]).T).to(a.dtype), p["attn.indexer.k_norm.weight"])
        shared.keys = quantised(round_fp4_index, rotate(keys, turns))

    def _select(self, x: Tensor, q_input: Tensor, entry_scores: Tensor, p: Parameters, shared: Shared) -> None:
        """Publish the top-k of this layer's index scores, and note how far these are from the layer's own attention."""
        c, a = self._config, self._arithmetic
        assert shared.keys is not None
        queries = (q_input.detach() @ a.dense(p["attn.indexer.wq_b.weight"]).T).unflatten(-1, (c.index_n_heads, -1))
        queries = quantised(round_fp4_index, rotate(queries, shared.compressed_turns))
        weights = (x.detach().float() @ a.plain(p["attn.indexer.weights_proj.weight"]).T).to(a.dtype).float()
        weights = (weights * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)).to(a.dtype).float()
        dots = queries.transpose(1, 2).flatten(1, 2).float() @ shared.keys.float().transpose(1, 2)
        dots = dots.unflatten(1, (c.index_n_heads, -1)).relu()
        scores = (dots * weights.transpose(1, 2)[..., None]).sum(1)
        positions = torch.arange(scores.shape[-1], device=x.device)
        visible = (torch.arange(x.shape[1], device=x.device) + 1).div(self._ratio, rounding_mode="floor")
        seen = (positions < visible[:, None]).expand_as(scores)
        if torch.is_grad_enabled():
            shared.index_losses.append(_divergence(entry_scores.detach(), scores, seen))
        allowed = seen
        is_source = self._layer == c.candidate_source_layer_id
        if 0 <= c.candidate_source_layer_id < self._layer:
            assert shared.candidates is not None
            allowed = seen & shared.candidates
        shared.chosen = best(scores.detach(), allowed, c.index_topk)
        if is_source:
            shared.candidates = self._candidates(scores.detach(), seen, visible)

    def _candidates(self, scores: Tensor, seen: Tensor, visible: Tensor) -> Tensor:
        """[B, S, n] bool: whole blocks, the newest visible one always among them."""
        size = self._config.candidate_block_size
        count = scores.shape[-1]
        peaks = pad(scores.masked_fill(~seen, -torch.inf), (0, -count % size), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
        blocks = torch.arange(peaks.shape[-1], device=scores.device)
        newest = (visible - 1).div(size, rounding_mode="floor")[:, None]
        peaks = peaks.masked_fill(blocks == newest, torch.inf)
        kept = best(peaks, (blocks <= newest).expand_as(peaks), self._config.candidate_topk_blocks)
        return kept.repeat_interleave(size, -1)[..., :count]


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """q [B, S, H, d] fp32, keys [B, n, d] -> fp32 [B, H, S, n]."""
    flat = q.transpose(1, 2).flatten(1, 2) @ keys.float().transpose(1, 2)
    scores: Tensor = flat.unflatten(1, (q.shape[2], -1))
    return scores


def best(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """Mask of the `count` highest allowed scores, lower positions first among equals. [..., n] -> bool [..., n]."""
    if scores.shape[-1] <= count:
        return allowed
    ranks = rank(scores.float(), torch.arange(scores.shape[-1], device=scores.device), allowed)
    least = ranks.topk(count, sorted=True).values[..., -1:]
    return (ranks >= least) & (ranks != ABSENT)


def _divergence(entry_scores: Tensor, index_scores: Tensor, seen: Tensor) -> Tensor:
    """Mean KL from the index scores' distribution to the attention of all heads, over the entries a query sees."""
    floor = torch.finfo(torch.float32).min
    target = entry_scores.masked_fill(~seen[:, None], floor).softmax(-1).mean(1)
    log_index = index_scores.masked_fill(~seen, floor).log_softmax(-1)
    loss = (target * ((target + 1e-9).log() - log_index)).masked_fill(~seen, 0).sum(-1)
    return loss.masked_fill(~seen.any(-1), 0).mean()
