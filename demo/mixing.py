"""Hyper-connections for many sequences at once, differentiable (docs/model.md has the formulas)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from evrun.coordinator.models.deepseek_v41.hyper_connection import sinkhorn
from evrun.expert_worker.wire.checkpoint.config import ModelConfig

_SOLVER_STEPS = 16


class Mix(NamedTuple):
    """[T, n], [T, n] and [T, n, n] fp32: weights of the next collapse, of the sublayer's output, of the streams."""

    pre: Tensor
    post: Tensor
    comb: Tensor


class _Balanced(torch.autograd.Function):
    """Sinkhorn's iteration, with the gradient of its limit.

    At the limit C = diag(r) exp(L) diag(c) has row and column sums 1, so dL = C * (G - u 1' - 1 v') where u and v make the row
    and column sums of dL zero. They are found by the same alternation as C itself, on n values instead of n^2.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, eps: float) -> Tensor:
        c = sinkhorn(logits, iterations, eps)
        ctx.save_for_backward(c)
        return c

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (c,) = ctx.saved_tensors
        weighted = c * grads[0]
        rows, columns = weighted.sum(-1, keepdim=True), weighted.sum(-2, keepdim=True)
        v = torch.zeros_like(columns)
        u = rows
        for _ in range(_SOLVER_STEPS):
            v = columns - (c * u).sum(-2, keepdim=True)
            u = rows - (c * v).sum(-1, keepdim=True)
        return weighted - c * (u + v), None, None


def mix(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, config: ModelConfig) -> Mix:
    """streams [T, n, D] dtype; fn [2n + n^2, nD], base [2n + n^2], scale [3] fp32."""
    n = config.hc_mult
    x = streams.flatten(1).float()
    m = (x @ fn.T) * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
    m = m * torch.cat([scale[i].expand(size) for i, size in enumerate((n, n, n * n))]) + base
    logits = m[:, 2 * n :].unflatten(-1, (n, n))
    comb: Tensor = _Balanced.apply(logits, config.hc_sinkhorn_iters, config.hc_eps)  # type: ignore[no-untyped-call]
    return Mix(m[:, :n].sigmoid() + config.hc_eps, m[:, n : 2 * n].sigmoid() * 2, comb)


def collapse(streams: Tensor, weights: Tensor) -> Tensor:
    """[T, n, D] dtype, [T, n] fp32 -> [T, D] fp32, not rounded yet."""
    return _weighted(streams, weights)


def expand(y: Tensor, streams: Tensor, mixed: Mix) -> Tensor:
    """Output y [T, D] dtype of a sublayer into the streams [T, n, D] dtype."""
    own = y.float()
    new = [mixed.post[:, j, None] * own + _weighted(streams, mixed.comb[:, :, j]) for j in range(streams.shape[1])]
    return torch.stack(new, 1).to(streams.dtype)


def _weighted(streams: Tensor, weights: Tensor) -> Tensor:
    """Sum over streams, term by term: as a batched product of tiny matrices it would take a card many times as long."""
    total = weights[:, 0, None] * streams[:, 0].float()
    for i in range(1, streams.shape[1]):
        total = total + weights[:, i, None] * streams[:, i].float()
    return total
