"""The MoE sublayer in training: every expert computes every token and the gate's zeros leave the rest out.

With small experts one dense product keeps a card busier than many small ones, and it is differentiable as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from evrun.demo.arithmetic import Arithmetic
from evrun.demo.parameters import Parameters
from evrun.expert_worker.wire.checkpoint.config import ModelConfig


class Routed(NamedTuple):
    """What a MoE sublayer did."""

    out: Tensor
    """[T, D] dtype"""
    load: Tensor
    """[E] fp32: how many tokens chose each expert"""
    balance: Tensor
    """fp32: load times mean score of each expert, 1 when both are even"""


def moe(x: Tensor, p: Parameters, config: ModelConfig, arithmetic: Arithmetic) -> Routed:
    """x [T, D] dtype, normalised; p: the layer's parameters without `layers.N.`."""
    a = arithmetic
    weights, load, balance = route(x, p["ffn.gate.weight"], p["ffn.gate.bias"], config, a)
    x_input = a.input(x)
    gate_up = [a.expert(p[f"ffn.experts.{part}"]).flatten(0, 1) for part in ("w1", "w3")]
    down = a.expert(p["ffn.experts.w2"]).transpose(1, 2).flatten(0, 1)
    inner = activation(x_input @ gate_up[0].T, x_input @ gate_up[1].T, config.swiglu_limit)
    inner = (inner.unflatten(-1, (config.n_routed_experts, -1)) * weights[..., None]).flatten(1).to(a.dtype)
    routed = a.input(inner) @ down
    w1, w3, w2 = (a.dense(p[f"ffn.shared_experts.{part}.weight"]) for part in ("w1", "w3", "w2"))
    shared = activation(x_input @ w1.T, x_input @ w3.T, config.swiglu_limit).to(a.dtype)
    out = (routed.float() + (a.input(shared) @ w2.T).float()).to(a.dtype)
    return Routed(out, load, balance)


def activation(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """fp32 silu(min(gate, limit)) * clamp(up, -limit, limit)."""
    return silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


def route(x: Tensor, weight: Tensor, bias: Tensor, config: ModelConfig, arithmetic: Arithmetic) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [T, E] fp32, zero for experts that were not chosen; load and balance as in Routed."""
    scores = softplus(x.float() @ arithmetic.plain(weight).T).sqrt()
    order = (scores.detach() + bias.detach()).sort(dim=-1, descending=True, stable=True).indices[:, : config.num_experts_per_tok]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)
    kept = scores * chosen
    weights = kept / (kept.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    load = chosen.float().sum(0)
    share = scores / scores.sum(-1, keepdim=True)
    balance = (load / load.sum() * share.mean(0)).sum() * scores.shape[-1]
    return weights, load, balance
