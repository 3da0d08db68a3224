"""RMSNorm (spec 3.1)."""

from __future__ import annotations

from torch import Tensor

from evrun.coordinator.models.deepseek_v41.arithmetic import Arithmetic


class RmsNorm:
    """w * x / rms(x), statistics and product in fp32, one rounding. No 1 is added to the weights."""

    def __init__(self, weight: Tensor, eps: float, arithmetic: Arithmetic) -> None:
        self._weight = weight.float()
        self._eps = eps
        self._arithmetic = arithmetic

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] dtype or fp32 -> [..., D] dtype."""
        x = x.float()
        scale = x.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        return self._arithmetic.round((x * scale).mul_(self._weight))
