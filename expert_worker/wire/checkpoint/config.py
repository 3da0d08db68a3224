"""The geometry of a DeepSeek-V4.1-Flash checkpoint: one schema for both config layouts of the release.

Fields carry the names of `text_config` in the nested `config.json` (spec section 1.2). `inference/config.json` is the
flat layout with other names for the same values; `parse` reads either.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the layers with compress ratio >= 1 (spec 3.4)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """Every value of the config that inference needs. Sizes are counts, ids are layer numbers."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    """One ratio per backbone layer (draft layers' entries are cut off): 0 window only, 1 or 2."""
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    """-1: no candidate pool."""
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    bos_token_id: int
    eos_token_id: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one routed expert of one layer as stored: codes and scales of w1, w3 and w2."""
        elements = 3 * self.hidden_size * self.moe_intermediate_size
        return elements // 2 + elements // 32

    def kv_source(self, layer: int) -> int:
        """The layer whose compressor, compressed cache and index keys `layer` reads (spec 1.3). Ratio >= 1 layers only."""
        return max(s for s in self.kv_source_layer_ids if s <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose indexer chose the entries that `layer` attends to (spec 1.3). Ratio >= 1 layers only."""
        return max(s for s in self.index_source_layer_ids if s <= layer)
