"""Hyper-connections: residual streams, the weights that mix them, and their application (spec 3.3)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from evrun.coordinator.models.deepseek_v41.arithmetic import Arithmetic
from evrun.expert_worker.wire.checkpoint.config import ModelConfig

EXPAND_ELEMENTS = 1 << 22
"""Products of streams with mixing weights at a time: 16 MiB of fp32."""


class Mix(NamedTuple):
    """Weights that one sublayer computes; n streams, all fp32."""

    pre: Tensor
    """[T, n]: collapse for the *next* sublayer"""
    post: Tensor
    """[T, n]: how much of the sublayer's output each stream gets"""
    comb: Tensor
    """[T, n, n]: [from stream, to stream]"""


class HyperConnection:
    """The mixing weights of one sublayer, computed from the streams before it."""

    def __init__(self, fn: Tensor, base: Tensor, scale: Tensor, config: ModelConfig) -> None:
        """fn [2n + n^2, n * D], base [2n + n^2], scale [3], all fp32."""
        n = config.hc_mult
        self._fn = fn
        self._base = base
        self._scale = torch.cat([factor.expand(size) for factor, size in zip(scale, (n, n, n * n), strict=True)])
        self._streams = n
        self._iterations = config.hc_sinkhorn_iters
        self._hc_eps = config.hc_eps
        self._norm_eps = config.rms_norm_eps

    def __call__(self, streams: Tensor) -> Mix:
        """streams [T, n, D] dtype."""
        x = streams.flatten(1).float()
        m = (x @ self._fn.T) * x.square().mean(-1, keepdim=True).add_(self._norm_eps).rsqrt_()
        return self.from_logits(m.mul_(self._scale).add_(self._base))

    def from_logits(self, m: Tensor) -> Mix:
        """m [T, 2n + n^2], already scaled and shifted."""
        n = self._streams
        # Two sigmoids on contiguous values, as the reference has them: the layout of its input decides the last bit of each.
        pre = m[:, :n].contiguous().sigmoid() + self._hc_eps
        post = m[:, n : 2 * n].contiguous().sigmoid() * 2
        return Mix(pre, post, sinkhorn(m[:, 2 * n :].unflatten(-1, (n, n)), self._iterations, self._hc_eps))


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """logits [T, n, n] -> nearly doubly stochastic: softmax over rows, then columns and rows in turn, columns last."""
    # The many small steps of every sublayer: a number as operand would be converted at each, so eps is a tensor once.
    floor = torch.full((), eps, dtype=torch.float32, device=logits.device)
    c = logits.softmax(-1).add_(floor)
    columns, rows = c.sum(-2, keepdim=True), c.new_empty(*c.shape[:-1], 1)
    c.div_(columns.add_(floor))
    for _ in range(iterations - 1):
        torch.sum(c, -1, keepdim=True, out=rows)
        c.div_(rows.add_(floor))
        torch.sum(c, -2, keepdim=True, out=columns)
        c.div_(columns.add_(floor))
    return c


def collapse(streams: Tensor, weights: Tensor, arithmetic: Arithmetic) -> Tensor:
    """streams [T, n, D] dtype, weights [T, n] fp32 -> sum over streams [T, D] dtype."""
    return arithmetic.round((weights[..., None] * streams.float()).sum(1))


def expand(y: Tensor, streams: Tensor, mix: Mix) -> Tensor:
    """y [T, D] dtype, streams [T, n, D] dtype -> the new streams [T, n, D] dtype. The sum runs over the first index of comb."""
    tokens, n, width = streams.shape
    out = torch.empty(tokens, n, width, dtype=streams.dtype, device=streams.device)
    step = max(1, EXPAND_ELEMENTS // (n * n * width))
    for start in range(0, tokens, step):
        piece = slice(start, start + step)
        # Products first, then one sum, as the reference has it; a matmul would be another last bit.
        carried = (mix.comb[piece, :, :, None] * streams[piece].float()[:, :, None]).sum(1)
        out[piece] = mix.post[piece, :, None] * y[piece].float()[:, None] + carried
    return out
