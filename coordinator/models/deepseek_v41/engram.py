"""Engram: rows of a big n-gram table, gated into every residual stream (spec 3.8)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from evrun.coordinator.models.deepseek_v41.arithmetic import Arithmetic
from evrun.coordinator.models.deepseek_v41.linear import Linear
from evrun.coordinator.weights import MappedTable
from evrun.kernels.formats_torch import dequantise_fp8_rows

GATE_FLOOR = 1e-6


class Engram:
    """One Engram layer. Its tables are never loaded: the rows of a call are gathered on the host and moved."""

    def __init__(
        self, codes: MappedTable, scales: MappedTable, wkv: Linear, q_weight: Tensor, k_weight: Tensor, eps: float, arithmetic: Arithmetic
    ) -> None:
        """q_weight, k_weight [streams, D] fp32."""
        self._codes = codes
        self._scales = scales
        self._wkv = wkv
        self._qk_weight = q_weight * k_weight
        self._eps = eps
        self._arithmetic = arithmetic

    def __call__(self, streams: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
        """streams [T, n, D] dtype, rows [T, columns] of the table -> new streams."""
        n, width = self._qk_weight.shape
        kv = self._wkv(self._arithmetic.linear_input(self._embeddings(rows))).float()
        k = kv[:, : n * width].unflatten(-1, (n, width))
        value = kv[:, None, n * width :]
        h = streams.float()
        dot = (h * self._qk_weight * k).sum(-1)
        dot = dot * (self._inverse_rms(h) * self._inverse_rms(k)) * width**-0.5
        return self._arithmetic.round(h + gate(dot)[..., None] * value)

    def _embeddings(self, rows: npt.NDArray[np.int64]) -> Tensor:
        """[T, columns * engram_head_dim] fp32, values that bfloat16 holds exactly."""
        device = self._qk_weight.device
        values = dequantise_fp8_rows(self._codes.gather(rows).to(device), self._scales.gather(rows).to(device))
        return values.to(torch.bfloat16).float().flatten(1)

    def _inverse_rms(self, x: Tensor) -> Tensor:
        return x.square().mean(-1).add_(self._eps).rsqrt_()


def gate(dot: Tensor) -> Tensor:
    """sigmoid of the signed root; 0 counts as positive."""
    root = dot.abs().clamp_(min=GATE_FLOOR).sqrt_()
    return torch.where(dot < 0, -root, root).sigmoid_()
