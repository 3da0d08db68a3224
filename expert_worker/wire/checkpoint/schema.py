"""Which tensors a checkpoint of this model holds, for any geometry (spec 2.2). Pure: ModelConfig -> names, dtypes, shapes."""

from __future__ import annotations

from collections.abc import Iterator

from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.header import Spec

BLOCK = 32
"""fp8 tiles are 32 x 32, fp4 groups and Engram scale groups 32 columns, whatever the geometry."""

SKIPPED_PREFIXES = ("mtp.", "vision.", "aligner.", "image_")
SKIPPED_SUFFIX = ".ffn.gate.bias_vl"

EXPERT_PARTS = ("w1.weight", "w1.scale", "w3.weight", "w3.scale", "w2.weight", "w2.scale")
"""The six tensors of one routed expert, in the order in which `Checkpoint.expert` returns them."""


def is_skipped(name: str) -> bool:
    """Whether the text backbone has no use for this tensor: draft layers, vision, the bias for image tokens."""
    return name.startswith(SKIPPED_PREFIXES) or name.endswith(SKIPPED_SUFFIX)


def is_engram_table(name: str) -> bool:
    """Whether this is one of the two big Engram tensors, from which only single rows are ever read."""
    return name.endswith((".engram.embed.weight", ".engram.embed.scale"))


def expert_name(layer: int, expert: int, part: str) -> str:
    return f"layers.{layer}.ffn.experts.{expert}.{part}"


def expert_specs(c: ModelConfig) -> tuple[Spec, ...]:
    """One routed expert, in the order of EXPERT_PARTS: two E2M1 codes per byte, one E8M0 scale per 32 columns."""
    hidden, inter = c.hidden_size, c.moe_intermediate_size
    up: Spec = ("I8", (inter, hidden // 2))
    up_scale: Spec = ("F8_E8M0", (inter, hidden // BLOCK))
    return (up, up_scale, up, up_scale, ("I8", (hidden, inter // 2)), ("F8_E8M0", (hidden, inter // BLOCK)))


def other_specs(c: ModelConfig) -> dict[str, Spec]:
    """Everything of the text backbone except the routed experts, in layer order."""
    specs: dict[str, Spec] = {"embed.weight": ("BF16", (c.vocab_size, c.hidden_size))}
    for layer in range(c.num_hidden_layers):
        prefix = f"layers.{layer}."
        specs |= {prefix + name: spec for name, spec in _layer(c, layer)}
    specs["norm.weight"] = ("BF16", (c.hidden_size,))
    specs["head.weight"] = ("BF16", (c.vocab_size, c.hidden_size))
    return specs


def text_schema(c: ModelConfig) -> dict[str, Spec]:
    """Every tensor of the text backbone: name -> (dtype, shape)."""
    specs = other_specs(c)
    parts = list(zip(EXPERT_PARTS, expert_specs(c), strict=True))
    for layer in range(c.num_hidden_layers):
        for expert in range(c.n_routed_experts):
            for part, spec in parts:
                specs[expert_name(layer, expert, part)] = spec
    return specs


def _linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, Spec]]:
    """An fp8 linear and its scale per 32 x 32 tile."""
    yield f"{name}.weight", ("F8_E4M3", (rows, columns))
    yield f"{name}.scale", ("F8_E8M0", (-(-rows // BLOCK), -(-columns // BLOCK)))


def _layer(c: ModelConfig, layer: int) -> Iterator[tuple[str, Spec]]:
    hidden, head, inter, streams = c.hidden_size, c.head_dim, c.moe_intermediate_size, c.hc_mult
    if layer in c.engram_layer_ids:
        yield from _engram(c, c.engram_num_embeddings[c.engram_layer_ids.index(layer)])
    mixes = 2 * streams + streams * streams
    for sublayer in ("attn", "ffn"):
        yield f"hc_{sublayer}_fn", ("F32", (mixes, streams * hidden))
        yield f"hc_{sublayer}_base", ("F32", (mixes,))
        yield f"hc_{sublayer}_scale", ("F32", (3,))
        yield f"{sublayer}_norm.weight", ("BF16", (hidden,))
    heads = c.num_attention_heads
    yield from _linear("attn.wq_a", c.q_lora_rank, hidden)
    yield "attn.q_norm.weight", ("BF16", (c.q_lora_rank,))
    yield from _linear("attn.wq_b", heads * head, c.q_lora_rank)
    yield from _linear("attn.wkv", head, hidden)
    yield "attn.kv_norm.weight", ("BF16", (head,))
    yield from _linear("attn.wo_a", c.o_groups * c.o_lora_rank, heads * head // c.o_groups)
    yield from _linear("attn.wo_b", hidden, c.o_groups * c.o_lora_rank)
    yield "attn.attn_sink", ("F32", (heads,))
    if layer in c.kv_source_layer_ids:
        yield "attn.compressor.wkv.weight", ("BF16", (head, hidden))
        if c.compress_ratios[layer] > 1:
            yield "attn.compressor.wgate.weight", ("BF16", (head, hidden))
        yield "attn.compressor.norm.weight", ("BF16", (head,))
        yield "attn.indexer.wk.weight", ("BF16", (c.index_head_dim, head))
        yield "attn.indexer.k_norm.weight", ("BF16", (c.index_head_dim,))
    if layer in c.index_source_layer_ids:
        yield from _linear("attn.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        yield "attn.indexer.weights_proj.weight", ("BF16", (c.index_n_heads, hidden))
    yield "ffn.gate.weight", ("BF16", (c.n_routed_experts, hidden))
    yield "ffn.gate.bias", ("F32", (c.n_routed_experts,))
    yield from _linear("ffn.shared_experts.w1", inter, hidden)
    yield from _linear("ffn.shared_experts.w3", inter, hidden)
    yield from _linear("ffn.shared_experts.w2", hidden, inter)


def _engram(c: ModelConfig, rows: int) -> Iterator[tuple[str, Spec]]:
    columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads
    yield "engram.embed.weight", ("F8_E4M3", (rows, c.engram_head_dim))
    yield "engram.embed.scale", ("F8_E8M0", (rows, c.engram_head_dim // BLOCK))
    yield from _linear("engram.wkv", (c.hc_mult + 1) * c.hidden_size, columns * c.engram_head_dim)
    yield "engram.q_weight", ("BF16", (c.hc_mult, c.hidden_size))
    yield "engram.k_weight", ("BF16", (c.hc_mult, c.hidden_size))
