"""Tensors by what they are for, and how many of each a model of some geometry has. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from evrun.expert_worker.wire.checkpoint.audit import Catalog
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.dtypes import ITEM_BYTES
from evrun.expert_worker.wire.checkpoint.header import Spec
from evrun.expert_worker.wire.checkpoint.schema import EXPERT_PARTS, expert_specs, other_specs

ROUTED = "routed experts"
DRAFT = "draft layers (not used)"
VISION = "vision (not used)"
GROUPS = (
    "attention", "compressors, indexers", "hyper-connections", "norms", "router", "shared experts", "embedding, head", ROUTED, "Engram",
    DRAFT, VISION, "other",
)  # fmt: skip
_LAYER = (
    (".engram.", "Engram"),
    (".attn.compressor.", "compressors, indexers"),
    (".attn.indexer.", "compressors, indexers"),
    (".attn.", "attention"),
    (".hc_", "hyper-connections"),
    (".ffn.gate.", "router"),
    (".ffn.shared_experts.", "shared experts"),
    (".ffn.experts.", ROUTED),
)
_NORM = re.compile(r"(layers\.\d+\.(attn|ffn)_)?norm\.weight")
_NOT_USED = (("mtp.", DRAFT), ("vision.", VISION), ("aligner.", VISION), ("image_", VISION))


class Size(NamedTuple):
    """Of a group."""

    tensors: int
    bytes: int


def group_of(name: str) -> str:
    """The group of a tensor, one of GROUPS (spec 2.1)."""
    for beginning, group in _NOT_USED:
        if name.startswith(beginning):
            return group
    if _NORM.fullmatch(name):
        return "norms"
    if name in ("embed.weight", "head.weight"):
        return "embedding, head"
    if name.startswith("layers."):
        return next((group for part, group in _LAYER if part in name), "other")
    return "other"


def found(catalog: Catalog, config: ModelConfig) -> dict[str, Size]:
    """What the headers hold, by group."""
    sizes = _sum((name, (place.dtype, place.shape)) for name, place in catalog.others.items())
    there = (catalog.expert_shards >= 0).reshape(-1, len(EXPERT_PARTS)).sum(axis=0)
    each = np.array([_bytes(spec) for spec in expert_specs(config)])
    sizes[ROUTED] = Size(int(there.sum()), int((there * each).sum()))
    return sizes


def expected(config: ModelConfig) -> dict[str, Size]:
    """What the text backbone of this geometry needs, by group."""
    sizes = _sum(other_specs(config).items())
    rows = config.num_hidden_layers * config.n_routed_experts
    sizes[ROUTED] = Size(rows * len(EXPERT_PARTS), rows * config.row_bytes)
    return sizes


def _sum(named: Iterable[tuple[str, Spec]]) -> dict[str, Size]:
    sizes: dict[str, Size] = {}
    for name, spec in named:
        group = group_of(name)
        before = sizes.get(group, Size(0, 0))
        sizes[group] = Size(before.tensors + 1, before.bytes + _bytes(spec))
    return sizes


def _bytes(spec: Spec) -> int:
    return ITEM_BYTES[spec[0]] * math.prod(spec[1])
