"""The router: which experts a token goes to and with which weights (spec 3.9)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

_SUM_FLOOR = 1e-20


class Gate:
    """sqrt(softplus) scores; the bias takes part in the choice, not in the weights. fp32 throughout."""

    def __init__(self, weight: Tensor, bias: Tensor, top_k: int, scaling: float) -> None:
        """weight [E, D] fp32, bias [E] fp32."""
        self._weight = weight
        self._bias = bias
        self._top_k = top_k
        self._scaling = scaling

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] dtype -> ids [T, K] int32, best score first, equal scores by lower id; weights [T, K] fp32."""
        scores = softplus(x.float() @ self._weight.T).sqrt()
        # Stable, so that equal scores stay in ascending order of id; topk promises no order among them.
        ids = (scores + self._bias).sort(dim=-1, descending=True, stable=True).indices[:, : self._top_k]
        weights = scores.gather(-1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + _SUM_FLOOR) * self._scaling
        return ids.to(torch.int32), weights
