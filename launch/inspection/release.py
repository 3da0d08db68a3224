"""The figures of the released checkpoint: deepseek-ai/DeepSeek-V4.1-Flash, revision dba1be0a40aa45a94ad051997016db3960a90277.

Totals are arithmetic over the published shapes and agree with the published sums to the byte. Tensor hashes and file
sizes were published by others who hold the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.launch.inspection.groups import DRAFT, ROUTED, VISION, Size

NAME = "DeepSeek-V4.1-Flash (revision dba1be0a)"
SHARDS = 48
TENSORS = 96_085
TOTAL_SIZE = 510_286_023_000
"""`metadata.total_size`: bytes of all tensors."""
SHARD_FILES_BYTES = 510_296_708_312
TEXT_BACKBONE = Size(93_418, 501_382_611_408)

GROUP_SIZES: Mapping[str, Size] = {
    "attention": Size(520, 5_069_721_600),
    "compressors, indexers": Size(43, 81_835_008),
    "hyper-connections": Size(240, 157_295_040),
    "norms": Size(81, 829_440),
    "router": Size(120, 157_409_280),
    "shared experts": Size(240, 1_416_960_000),
    "embedding, head": Size(2, 2_647_654_400),
    ROUTED: Size(92_160, 288_777_830_400),
    "Engram": Size(12, 203_073_076_240),
    DRAFT: Size(2_401, 7_932_874_632),
    VISION: Size(266, 970_536_960),
}

FILE_BYTES: Mapping[int, int] = {44: 2_652_728_736, 45: 2_573_998_176, 46: 2_706_402_896, 47: 101_535_150_936, 48: 101_537_926_640}
"""Shard number -> bytes of the file."""

FILE_SHA256: Mapping[str, str] = {
    "model.safetensors.index.json": "74b0686a3d2891980d5e303251b075a3bccae2c2ff650747db2620a649b98fa8",
    "tokenizer.json": "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b",
    "tokenizer_config.json": "6ac8c8dc065ed118161d02dd532749ae3f52c243deac27872134fae2f50d8547",
}

TENSOR_SHA256: Mapping[str, str] = {
    "layers.0.attn.wq_a.weight": "d75dd17b5fd33533ab8269412e23c01a44314fd719b8e0d274cd437b3f125af7",
    "layers.0.ffn.experts.0.w1.weight": "84c55fa21fcbf91d97372c49ab1556220d50fd613219b9fe975da493e071d9a4",
    "layers.14.attn.compressor.wkv.weight": "42318c7477d6948b6ee6b9f9fa4c2b0377344fbcf11a9f3832dc26d3f5ab5888",
    "layers.39.ffn.gate.weight": "8ff7c88eb8478365a88697edb79f436c17db765d753c7a1e7959c365f06e46a9",
    "norm.weight": "9cd3b57cd9513541b9771bf66c9b356bf1a7b20ff050ed69f7e97cff9fedd428",
}
"""Of the raw bytes."""


class Sample(NamedTuple):
    """The beginning of row 0 of a weight, as bytes and as numbers."""

    weight: str
    scale: str
    codes: bytes
    scale_byte: int
    values: tuple[float, ...]


SAMPLES = (
    Sample(
        "layers.0.attn.wkv.weight", "layers.0.attn.wkv.scale", bytes.fromhex("d871f2797069f0e5"), 0x73,
        (-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125),
    ),
    Sample(
        "layers.0.ffn.experts.0.w1.weight", "layers.0.ffn.experts.0.w1.scale", bytes.fromhex("a0a8ec4aadaf42aa"), 0x78,
        (0, -0.0078125, 0, -0.0078125, -0.015625, -0.03125, -0.0078125, 0.015625,
         -0.0234375, -0.0078125, -0.046875, -0.0078125, 0.0078125, 0.015625, -0.0078125, -0.0078125),
    ),
)  # fmt: skip


def claims_to_be(config: ModelConfig, tensors: int, total_size: int | None, index_sha256: str) -> bool:
    """Whether a directory means to be the release: its sizes, and its index, its tensor count or its total."""
    sizes = (config.vocab_size, config.hidden_size, config.moe_intermediate_size, config.num_hidden_layers, config.n_routed_experts)
    if sizes != (129280, 5120, 2304, 40, 384):
        return False
    return index_sha256 == FILE_SHA256["model.safetensors.index.json"] or tensors == TENSORS or total_size == TOTAL_SIZE
