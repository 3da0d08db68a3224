"""One softmax over a query's window, its chosen compressed entries and the sink (spec 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from evrun.coordinator.models.deepseek_v41.arithmetic import Arithmetic

GATHER_ELEMENTS = 1 << 22
"""Gathered key channels at a time: 16 MiB of fp32."""
SOFTMAX_BLOCK = 64
"""The reference's running maximum moves on after this many slots; it decides which bf16 a weight is rounded to."""
_LOWEST = -1e30


def attend(
    q: Tensor,
    recent: Tensor,
    window_rows: Tensor,
    in_window: Tensor,
    entries: Tensor,
    picks: Tensor,
    sink: Tensor,
    scale: float,
    arithmetic: Arithmetic,
) -> Tensor:
    """Attention output before its inverse rotation.

    q          [T, H, d] dtype
    recent     [W - 1 + T, d]: keys of the W - 1 positions before the call, then of its T tokens
    window_rows, in_window  [T, w]: rows of `recent` in a query's window, and whether a slot counts
    entries    [n, d] compressed cache; picks [T, k] int64, -1 for none
    sink       [H] fp32
    Returns [T, H, d] dtype. Works on as many queries at once as GATHER_ELEMENTS allows.
    """
    width = in_window.shape[1] + picks.shape[1]
    out = torch.empty_like(q)
    step = max(1, GATHER_ELEMENTS // (width * q.shape[2]))
    for start in range(0, q.shape[0], step):
        piece = slice(start, start + step)
        keys, valid = recent[window_rows[piece]], in_window[piece]
        if picks.shape[1]:
            some = picks[piece]
            keys = torch.cat((keys, entries[some.clamp(min=0)]), 1)
            valid = torch.cat((valid, some >= 0), 1)
        keys = keys.float()
        scores = torch.bmm(q[piece].float(), keys.transpose(1, 2)).mul_(scale)
        scores.masked_fill_(~valid[:, None], -torch.inf)
        out[piece] = _weigh(scores, keys, sink, arithmetic)
    return out


def _weigh(scores: Tensor, keys: Tensor, sink: Tensor, arithmetic: Arithmetic) -> Tensor:
    """scores [Q, H, n], keys [Q, n, d] -> [Q, H, d] fp32. At least one slot, the query's own, is never masked.

    As the reference sums: block after block, the weights of a block relative to the maximum so far and rounded, the sum of
    them not rounded. What does not depend on the block before is done for all whole blocks at once.
    """
    slots = scores.shape[-1]
    whole = slots // SOFTMAX_BLOCK * SOFTMAX_BLOCK
    peak = scores.new_full(scores.shape[:2], _LOWEST)
    total = torch.zeros_like(peak)
    out = scores.new_zeros(*scores.shape[:2], keys.shape[2])
    for start, stop, size in ((0, whole, SOFTMAX_BLOCK), (whole, slots, slots - whole)):
        if start == stop:
            continue
        some = scores[..., start:stop].unflatten(-1, (-1, size))
        peaks = torch.cat((peak[..., None], some.amax(-1)), -1).cummax(-1).values
        weights = (some - peaks[..., 1:, None]).exp_()
        fading = (peaks[..., :-1] - peaks[..., 1:]).exp_()
        sums = weights.sum(-1)
        values = torch.matmul(arithmetic.rounded(weights).transpose(1, 2), keys[:, start:stop].unflatten(1, (-1, size)))
        for block in range(sums.shape[-1]):
            total.mul_(fading[..., block]).add_(sums[..., block])
            out.mul_(fading[..., block, None]).add_(values[:, block])
        peak = peaks[..., -1]
    total.add_((sink - peak).exp_())
    return out.div_(total[..., None])
