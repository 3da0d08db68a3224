"""One softmax over a query's window, its chosen compressed entries and the sink (spec 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from evrun.coordinator.models.deepseek_v41.arithmetic import Arithmetic

GATHER_ELEMENTS = 1 << 22
"""Gathered key channels at a time: 16 MiB of fp32."""
SOFTMAX_BLOCK = 64
"""The reference's running maximum moves on after this many slots; it decides which bf16 a weight is rounded to."""
_LOWEST = -1e30


def attend(
    q: Tensor, recent: Tensor, in_window: Tensor, entries: Tensor, picks: Tensor, sink: Tensor, scale: float, arithmetic: Arithmetic
) -> Tensor:
    """Attention output before its inverse rotation.

    q          [T, H, d] dtype
    recent     [W - 1 + T, d]: keys of the W - 1 positions before the call, then of its T tokens
    in_window  [T, W] bool: whether slot w of a query's window is a position >= 0
    entries    [n, d] compressed cache; picks [T, k] int64, -1 for none
    sink       [H] fp32
    Returns [T, H, d] dtype. Works on as many queries at once as GATHER_ELEMENTS allows.
    """
    window, width = in_window.shape[1], in_window.shape[1] + picks.shape[1]
    windows = recent.unfold(0, window, 1).transpose(1, 2)
    out = torch.empty_like(q)
    step = max(1, GATHER_ELEMENTS // (width * q.shape[2]))
    for start in range(0, q.shape[0], step):
        piece = slice(start, start + step)
        keys, valid = windows[piece], in_window[piece]
        if picks.shape[1]:
            some = picks[piece]
            keys = torch.cat((keys, entries[some.clamp(min=0)]), 1)
            valid = torch.cat((valid, some >= 0), 1)
        keys = keys.float()
        scores = torch.bmm(q[piece].float(), keys.transpose(1, 2)).mul_(scale)
        scores.masked_fill_(~valid[:, None], -torch.inf)
        out[piece] = _weigh(scores, keys, sink) if arithmetic.is_exact else _weigh_in_blocks(scores, keys, sink, arithmetic)
    return out


def _weigh(scores: Tensor, keys: Tensor, sink: Tensor) -> Tensor:
    """scores [Q, H, n], keys [Q, n, d] -> [Q, H, d] fp32. At least one slot, the query's own, is never masked."""
    peak = scores.amax(-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True) + (sink[:, None] - peak).exp_()
    return torch.bmm(weights, keys).div_(total)


def _weigh_in_blocks(scores: Tensor, keys: Tensor, sink: Tensor, arithmetic: Arithmetic) -> Tensor:
    """The same with the reference's rounding: weights relative to the maximum so far, rounded, the sum of them not rounded."""
    count = scores.shape[-1]
    missing = -count % SOFTMAX_BLOCK
    scores = pad(scores, (0, missing), value=-torch.inf).unflatten(-1, (-1, SOFTMAX_BLOCK))
    keys = pad(keys, (0, 0, 0, missing)).unflatten(1, (-1, SOFTMAX_BLOCK))
    peaks = scores.amax(-1).clamp_(min=_LOWEST).cummax(-1).values
    weights = scores.sub_(peaks[..., None]).exp_()
    sums = weights.sum(-1)
    rounded = arithmetic.rounded(weights).transpose(1, 2)
    values = torch.matmul(rounded, keys)
    total, out = sums[..., 0], values[:, 0]
    if peaks.shape[-1] > 1:
        fading = (peaks[..., :-1] - peaks[..., 1:]).exp_()
        for block in range(1, peaks.shape[-1]):
            fade = fading[..., block - 1]
            total = total * fade + sums[..., block]
            out = out * fade[..., None] + values[:, block]
    total = total + (sink - peaks[..., -1]).exp_()
    return out / total[..., None]
