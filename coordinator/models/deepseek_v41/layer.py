"""One layer: Engram, attention and MoE on the residual streams (spec 3.0)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from evrun.coordinator.models.deepseek_v41.arithmetic import Arithmetic
from evrun.coordinator.models.deepseek_v41.attention import Attention
from evrun.coordinator.models.deepseek_v41.engram import Engram
from evrun.coordinator.models.deepseek_v41.hyper_connection import HyperConnection, collapse, expand
from evrun.coordinator.models.deepseek_v41.moe import Moe
from evrun.coordinator.models.deepseek_v41.norm import RmsNorm
from evrun.coordinator.models.deepseek_v41.step import Step
from evrun.coordinator.models.interface import Experts


@dataclass(frozen=True)
class Layer:
    """The parts of one layer and their order. The weights that collapse the streams pass from sublayer to sublayer."""

    number: int
    engram: Engram | None
    engram_index: int
    """Which of the Engram layers this is; -1 without one."""
    attn_mix: HyperConnection
    attn_norm: RmsNorm
    attention: Attention
    ffn_mix: HyperConnection
    ffn_norm: RmsNorm
    moe: Moe
    arithmetic: Arithmetic

    def __call__(self, streams: Tensor, pre: Tensor, step: Step, experts: Experts) -> tuple[Tensor, Tensor]:
        """streams [T, n, D] dtype, pre [T, n] fp32: weights of the next collapse -> both after the layer."""
        details = step.details
        if self.engram:
            streams = self.engram(streams, step.engram_rows[:, self.engram_index])
            if details:
                details.tensor(self.number, "engram_out", streams)
        mix = self.attn_mix(streams)
        x = self.attn_norm(collapse(streams, pre, self.arithmetic))
        y = self.attention(x, step)
        if details:
            details.tensor(self.number, "attn_in", x)
            details.tensor(self.number, "attn_out", y)
        streams, pre = expand(y, streams, mix), mix.pre
        mix = self.ffn_mix(streams)
        x = self.ffn_norm(collapse(streams, pre, self.arithmetic))
        y = self.moe(x, step, experts)
        streams, pre = expand(y, streams, mix), mix.pre
        if details:
            details.tensor(self.number, "out", streams)
            details.tensor(self.number, "next_pre_mix", pre)
        return streams, pre
