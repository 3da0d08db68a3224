"""The MoE sublayer: route, hand the routed experts out, compute the shared one meanwhile, add (spec 3.9)."""

from __future__ import annotations

from torch import Tensor

from evrun.coordinator.models.deepseek_v41.arithmetic import Arithmetic
from evrun.coordinator.models.deepseek_v41.gate import Gate
from evrun.coordinator.models.deepseek_v41.shared_expert import SharedExpert
from evrun.coordinator.models.deepseek_v41.step import Step
from evrun.coordinator.models.interface import Experts


class Moe:
    """One layer's feed-forward."""

    def __init__(self, layer: int, gate: Gate, shared: SharedExpert, arithmetic: Arithmetic) -> None:
        self._layer = layer
        self._gate = gate
        self._shared = shared
        self._arithmetic = arithmetic

    def __call__(self, x: Tensor, step: Step, experts: Experts) -> Tensor:
        """x [T, D] dtype, normalised -> [T, D] dtype: routed and shared sum, rounded once."""
        ids, weights = self._gate(x)
        if step.observer:
            step.observer.route(self._layer, ids, weights)
        collect = experts(self._layer, x, ids, weights)
        shared = self._shared(x)
        routed = collect().to(x.device)
        if step.observer:
            step.observer.moe(self._layer, x, routed)
        if step.details:
            step.details.tensor(self._layer, "moe_shared_out", shared)
        return self._arithmetic.round(routed + shared.float())
