"""Which tensor goes into which shard. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.header import Spec
from evrun.expert_worker.wire.checkpoint.schema import text_schema


@dataclass(frozen=True)
class ShardPlan:
    """One file and its tensors in file order."""

    file: str
    tensors: tuple[tuple[str, Spec], ...]


def plan_shards(config: ModelConfig, scatter: int = 0, seed: int = 0) -> list[ShardPlan]:
    """One shard per layer as in the release (spec 2.3): embedding, layers, head with norm, then one per Engram layer.

    scatter: 0, or a number of shards over which every tensor is thrown on its own, so that codes and their scales part.
    """
    schema = text_schema(config)
    groups: dict[int, list[str]] = {}
    if scatter:
        names = list(schema)
        random.Random(seed).shuffle(names)
        for i, name in enumerate(names):
            groups.setdefault(i % scatter, []).append(name)
    else:
        for name in schema:
            groups.setdefault(_group(name, config.num_hidden_layers), []).append(name)

    def in_file_order(names: list[str]) -> tuple[tuple[str, Spec], ...]:
        return tuple((n, schema[n]) for n in sorted(names, key=lambda n: (_DTYPE_ORDER[schema[n][0]], n)))

    count = len(groups)
    return [ShardPlan(f"model-{i:05d}-of-{count:05d}.safetensors", in_file_order(groups[k])) for i, k in enumerate(sorted(groups), 1)]


def _group(name: str, num_layers: int) -> int:
    fields = name.split(".", 3)
    if fields[0] != "layers":
        return 0 if fields[0] == "embed" else num_layers + 1
    layer = int(fields[1])
    return num_layers + 2 + layer if fields[2] == "engram" else layer + 1


_DTYPE_ORDER = {"F32": 0, "BF16": 1, "F8_E8M0": 2, "F8_E4M3": 3, "I8": 4}
"""Wide types first, so that every tensor is aligned to its own element, as the common writers put them."""
