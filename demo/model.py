"""The text backbone for training: whole sequences in parallel, no decode state, the arithmetic of the coordinator's model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from evrun.coordinator.models.deepseek_v41.engram import GATE_FLOOR
from evrun.demo.arithmetic import Arithmetic
from evrun.demo.attention import Attention, Shared, rms_norm, weigh
from evrun.demo.engram_rows import EngramRows
from evrun.demo.mixing import Mix, collapse, expand, mix
from evrun.demo.moe import moe
from evrun.demo.parameters import Parameters
from evrun.expert_worker.wire.checkpoint.config import ModelConfig


class Output(NamedTuple):
    """Of one forward pass."""

    logits: Tensor
    """[B, S, V] fp32"""
    loads: Tensor
    """[layers, E] fp32: tokens of each expert"""
    balance: Tensor
    """fp32, mean over layers; 1 when experts are used evenly"""
    index_loss: Tensor
    """fp32, mean over index sources"""


class TrainingModel:
    """Forward passes over parameters that the caller owns."""

    def __init__(self, config: ModelConfig, token_map: npt.NDArray[np.int32], compiler: Callable[[Any], Any] = lambda f: f) -> None:
        """token_map: of the tokenizer, as `engram_map.token_map` gives it; compiler: wraps the functions with most small steps."""
        self.config = config
        self._rows = EngramRows(config, token_map)
        self._weigh, self._moe = compiler(weigh), compiler(moe)
        self._expand, self._normed, self._gated = compiler(expand), compiler(_normed), compiler(_gated)

    def __call__(self, p: Parameters, tokens: Tensor, arithmetic: Arithmetic) -> Output:
        """tokens [B, S] int64 that begin at position 0, on the parameters' device."""
        c, a = self.config, arithmetic
        batch, length = tokens.shape
        shared = Shared.of(c, length, tokens.device)
        embedded = a.plain(p["embed.weight"])[tokens].to(a.dtype).flatten(0, 1)
        streams = embedded[:, None].expand(-1, c.hc_mult, -1)
        pre = torch.zeros(batch * length, c.hc_mult, device=tokens.device)
        pre[:, 0] = 1
        table_rows = self._rows(tokens)
        loads, balances = [], []
        for number in range(c.num_hidden_layers):
            prefix = f"layers.{number}."
            own = {name.removeprefix(prefix): tensor for name, tensor in p.items() if name.startswith(prefix)}
            if number in c.engram_layer_ids:
                rows = table_rows[c.engram_layer_ids.index(number)].flatten(0, 1)
                streams = self._engram(streams, rows, own, a)
            attention = Attention(number, c, a, self._weigh)
            mixed = self._mix(streams, own, "attn")
            y = attention(self._input(streams, pre, own["attn_norm.weight"], a).unflatten(0, (batch, length)), own, shared)
            streams, pre = self._expand(y.flatten(0, 1), streams, mixed), mixed.pre
            mixed = self._mix(streams, own, "ffn")
            routed = self._moe(self._input(streams, pre, own["ffn_norm.weight"], a), _of_moe(own), c, a)
            streams, pre = self._expand(routed.out, streams, mixed), mixed.pre
            loads.append(routed.load)
            balances.append(routed.balance)
        x = self._input(streams, pre, p["norm.weight"], a)
        logits = (x.float() @ a.plain(p["head.weight"]).T).unflatten(0, (batch, length))
        index_loss = torch.stack(shared.index_losses).mean() if shared.index_losses else logits.new_zeros(())
        return Output(logits, torch.stack(loads), torch.stack(balances).mean(), index_loss)

    def _mix(self, streams: Tensor, p: Parameters, sublayer: str) -> Mix:
        fn, base, scale = (p[f"hc_{sublayer}_{part}"] for part in ("fn", "base", "scale"))
        return mix(streams, fn, base, scale, self.config)

    def _input(self, streams: Tensor, pre: Tensor, weight: Tensor, a: Arithmetic) -> Tensor:
        normed: Tensor = self._normed(streams, pre, a.plain(weight), self.config.rms_norm_eps)
        return normed

    def _engram(self, streams: Tensor, rows: Tensor, p: Parameters, a: Arithmetic) -> Tensor:
        """streams [T, n, D], rows [T, columns]."""
        c = self.config
        embedded = a.rows(p["engram.embed.weight"][rows]).flatten(1)
        kv = a.input(embedded) @ a.dense(p["engram.wkv.weight"]).T
        gated: Tensor = self._gated(streams, kv, a.plain(p["engram.q_weight"]) * a.plain(p["engram.k_weight"]), c.rms_norm_eps)
        return gated


def _gated(streams: Tensor, kv: Tensor, weight: Tensor, eps: float) -> Tensor:
    """streams [T, n, D] dtype, kv [T, (n + 1) D] dtype, weight [n, D] fp32 -> new streams."""
    n, width = weight.shape
    kv = kv.float()
    k, value = kv[:, : n * width].unflatten(-1, (n, width)), kv[:, None, n * width :]
    h = streams.float()
    dot = (h * weight * k).sum(-1) * (_inverse_rms(h, eps) * _inverse_rms(k, eps)) * width**-0.5
    root = dot.abs().clamp(min=GATE_FLOOR).sqrt()
    gate = torch.where(dot < 0, -root, root).sigmoid()
    return (h + gate[..., None] * value).to(streams.dtype)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1) + eps).rsqrt()


def _normed(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The input of a sublayer: streams [T, n, D] dtype, pre [T, n], weight [D] fp32 -> [T, D] dtype."""
    return rms_norm(collapse(streams, pre).to(streams.dtype), weight, eps, streams.dtype)


def _of_moe(p: Parameters) -> Parameters:
    """The same names in every layer, so that what is compiled for one fits all."""
    return {name: tensor for name, tensor in p.items() if name.startswith("ffn.")}
