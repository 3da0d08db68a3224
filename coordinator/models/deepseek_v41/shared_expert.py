"""The shared expert: one SwiGLU that every token passes (spec 3.9)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from evrun.coordinator.models.deepseek_v41.arithmetic import Arithmetic
from evrun.coordinator.models.deepseek_v41.linear import Linear


class SharedExpert:
    """w2(silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit)); the clamps hold here as in the routed experts."""

    def __init__(self, w1: Linear, w3: Linear, w2: Linear, limit: float, arithmetic: Arithmetic) -> None:
        self._w1 = w1
        self._w3 = w3
        self._w2 = w2
        self._limit = limit
        self._arithmetic = arithmetic

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, D] dtype -> [T, D] dtype."""
        a = self._arithmetic
        x = a.linear_input(x)
        gated = silu(self._w1(x).float().clamp(max=self._limit))
        gated *= self._w3(x).float().clamp(-self._limit, self._limit)
        return self._w2(a.linear_input(a.round(gated)))
