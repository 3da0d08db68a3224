"""A checkpoint's dense tensors put together to the model, one tensor at a time (names: spec 2.2).

Memory afterwards: with dense_dtype `fp8` the dense tensors as stored, except that all small BF16 ones and the scales
are kept in fp32; with `bfloat16` one more byte for each dense fp8 weight. The embedding and the Engram tables stay in the
page cache. At the release's sizes: 8.2 GiB and 14.5 GiB. Peak while loading: that plus one tensor (the head: 1.3 GiB on
the host when it is moved to a card).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from evrun.coordinator.engram_hash import EngramHash
from evrun.coordinator.models.deepseek_v41.arithmetic import Arithmetic
from evrun.coordinator.models.deepseek_v41.attention import Attention, AttentionWeights
from evrun.coordinator.models.deepseek_v41.compressor import Compressor, KvSource
from evrun.coordinator.models.deepseek_v41.engram import Engram
from evrun.coordinator.models.deepseek_v41.gate import Gate
from evrun.coordinator.models.deepseek_v41.hyper_connection import HyperConnection
from evrun.coordinator.models.deepseek_v41.indexer import Indexer, IndexKeys
from evrun.coordinator.models.deepseek_v41.layer import Layer
from evrun.coordinator.models.deepseek_v41.linear import GroupedLinear, Linear, PackedWeight, PlainWeight, Weight
from evrun.coordinator.models.deepseek_v41.model import DeepseekV41, Parts
from evrun.coordinator.models.deepseek_v41.moe import Moe
from evrun.coordinator.models.deepseek_v41.norm import RmsNorm
from evrun.coordinator.models.deepseek_v41.rope import compressed_frequencies
from evrun.coordinator.models.deepseek_v41.shared_expert import SharedExpert
from evrun.coordinator.weights import DenseLoader
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.errors import UsageError

DENSE_DTYPES = ("fp8", "bfloat16")


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: str,
    numerics: str,
    dense_dtype: str,
    device: str,
    token_map: npt.NDArray[np.int32] | None,
    progress: Callable[[int, str], None],
) -> DeepseekV41:
    """See coordinator.models.registry.load_model."""
    if dense_dtype not in DENSE_DTYPES:
        raise UsageError(f"dense dtype: expected one of {', '.join(DENSE_DTYPES)}, found {dense_dtype!r}")
    arithmetic = Arithmetic.named(dtype, numerics)
    config = checkpoint.config
    engram_hash = None
    if config.engram_layer_ids:
        if token_map is None:
            raise UsageError("token map: this checkpoint has Engram layers and cannot run without one")
        engram_hash = EngramHash(config, token_map)
    loader = DenseLoader(checkpoint, torch.device(device), progress)
    builder = _Builder(config, loader, arithmetic, dense_dtype == "fp8")
    parts = Parts(
        embed=loader.mapped_dense("embed.weight"),
        layers=tuple(builder.layer(number) for number in range(config.num_hidden_layers)),
        norm=builder.norm("norm"),
        head=PlainWeight(loader.load("head.weight")),
        engram_hash=engram_hash,
    )
    return DeepseekV41(config, parts, arithmetic, loader.device)


class _Builder:
    """Tensor names -> parts of a layer."""

    def __init__(self, config: ModelConfig, loader: DenseLoader, arithmetic: Arithmetic, keep_packed: bool) -> None:
        self._config = config
        self._loader = loader
        self._arithmetic = arithmetic
        self._keep_packed = keep_packed

    def layer(self, number: int) -> Layer:
        prefix = f"layers.{number}"
        has_engram = number in self._config.engram_layer_ids
        return Layer(
            number=number,
            engram=self._engram(f"{prefix}.engram") if has_engram else None,
            engram_index=self._config.engram_layer_ids.index(number) if has_engram else -1,
            attn_mix=self._mix(f"{prefix}.hc_attn"),
            attn_norm=self.norm(f"{prefix}.attn_norm"),
            attention=self._attention(number, f"{prefix}.attn"),
            ffn_mix=self._mix(f"{prefix}.hc_ffn"),
            ffn_norm=self.norm(f"{prefix}.ffn_norm"),
            moe=self._moe(number, f"{prefix}.ffn"),
            arithmetic=self._arithmetic,
        )

    def norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._loader.load(f"{name}.weight"), self._config.rms_norm_eps, self._arithmetic)

    def _float(self, name: str) -> Tensor:
        return self._loader.load(name).float()

    def _packed(self, name: str) -> Weight:
        weight = PackedWeight(self._loader.load(f"{name}.weight"), self._loader.load(f"{name}.scale"))
        return weight if self._keep_packed else weight.to_bfloat16()

    def _linear(self, name: str) -> Linear:
        return Linear(self._packed(name), self._arithmetic)

    def _plain(self, name: str) -> Linear:
        """Small and used at every token: held in fp32, so that no use converts it."""
        return Linear(PlainWeight(self._float(f"{name}.weight")), self._arithmetic)

    def _mix(self, name: str) -> HyperConnection:
        c = self._config
        fn, base, scale = (self._loader.load(f"{name}_{part}") for part in ("fn", "base", "scale"))
        return HyperConnection(fn, base, scale, c)

    def _attention(self, number: int, prefix: str) -> Attention:
        c = self._config
        weights = AttentionWeights(
            wq_a=self._linear(f"{prefix}.wq_a"),
            q_norm=self.norm(f"{prefix}.q_norm"),
            wq_b=self._linear(f"{prefix}.wq_b"),
            wkv=self._linear(f"{prefix}.wkv"),
            kv_norm=self.norm(f"{prefix}.kv_norm"),
            wo_a=GroupedLinear(self._packed(f"{prefix}.wo_a"), c.o_groups, self._arithmetic),
            wo_b=self._linear(f"{prefix}.wo_b"),
            sink=self._loader.load(f"{prefix}.attn_sink"),
        )
        source = self._kv_source(prefix, c.compress_ratios[number]) if number in c.kv_source_layer_ids else None
        indexer = self._indexer(number, f"{prefix}.indexer") if number in c.index_source_layer_ids else None
        return Attention(number, weights, c, source, indexer, self._arithmetic)

    def _kv_source(self, prefix: str, ratio: int) -> KvSource:
        gate = self._plain(f"{prefix}.compressor.wgate") if ratio > 1 else None
        wkv, norm = self._plain(f"{prefix}.compressor.wkv"), self.norm(f"{prefix}.compressor.norm")
        compressor = Compressor(wkv, gate, norm, ratio, self._arithmetic)
        keys = IndexKeys(self._plain(f"{prefix}.indexer.wk"), self.norm(f"{prefix}.indexer.k_norm"), self._arithmetic)
        return KvSource(compressor, keys, compressed_frequencies(self._config).to(self._loader.device), ratio)

    def _indexer(self, number: int, prefix: str) -> Indexer:
        is_candidate_source = number == self._config.candidate_source_layer_id
        projections = self._linear(f"{prefix}.wq_b"), self._plain(f"{prefix}.weights_proj")
        return Indexer(*projections, self._config, is_candidate_source, self._arithmetic)

    def _moe(self, number: int, prefix: str) -> Moe:
        c = self._config
        weight, bias = self._float(f"{prefix}.gate.weight"), self._loader.load(f"{prefix}.gate.bias")
        gate = Gate(weight, bias, c.num_experts_per_tok, c.routed_scaling_factor)
        w1, w3, w2 = (self._linear(f"{prefix}.shared_experts.{part}") for part in ("w1", "w3", "w2"))
        return Moe(number, gate, SharedExpert(w1, w3, w2, c.swiglu_limit, self._arithmetic), self._arithmetic)

    def _engram(self, prefix: str) -> Engram:
        codes, scales = self._loader.table(f"{prefix}.embed.weight"), self._loader.table(f"{prefix}.embed.scale")
        q_weight, k_weight = self._float(f"{prefix}.q_weight"), self._float(f"{prefix}.k_weight")
        return Engram(codes, scales, self._linear(f"{prefix}.wkv"), q_weight, k_weight, self._config.rms_norm_eps, self._arithmetic)
