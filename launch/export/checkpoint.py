"""A whole checkpoint from a ModelConfig: shards, config, tokenizer, index. The library under `evrun make-checkpoint`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from evrun.coordinator.engram_map import distinct, token_map
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.launch.export import documents, geometry, tokenizer
from evrun.launch.export.plan import plan_shards
from evrun.launch.export.weights import RandomWeights
from evrun.launch.export.writer import Payload, Progress, write_files

Layout = Literal["nested", "flat", "both"]
LAYOUTS: tuple[Layout, ...] = ("nested", "flat", "both")


def complete(values: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of `geometry.values` with the generated tokenizer of its vocabulary. Raises UsageError."""
    built = tokenizer.build(values["vocab_size"])
    return geometry.make_config(values, compressed_size(built, values["vocab_size"]))


def compressed_size(built: Tokenizer, vocab_size: int) -> int:
    """Distinct values of the Engram token map of a tokenizer: `engram_compressed_vocab_size`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(built.to_str(), encoding="utf-8")
        return distinct(token_map(path, vocab_size))


def write_checkpoint(
    config: ModelConfig,
    directory: str | Path,
    seed: int = 0,
    *,
    payload: Payload | None = None,
    built: Tokenizer | None = None,
    scatter: int = 0,
    layout: Layout = "nested",
    force: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write a checkpoint; returns the bytes of its tensors.

    payload: bytes of every tensor by name, e.g. of a trained model; random weights of `seed` when None.
    built: the tokenizer; one generated for `config.vocab_size` when None.
    scatter: 0 for one shard per layer, N to throw every tensor into one of N shards.
    Raises UsageError (directory not empty), RunError (disk full): nothing is left behind.
    """
    built = built or tokenizer.build(config.vocab_size)
    image = built.token_to_id(tokenizer.SPECIALS[-1])
    files = {
        "tokenizer.json": built.to_str(pretty=True),
        "tokenizer_config.json": tokenizer.settings(config.max_position_embeddings),
    }
    if layout != "flat":
        files["config.json"] = documents.nested(config, image if image is not None else -1)
    if layout != "nested":
        files["inference/config.json"] = documents.flat(config)
    plan = plan_shards(config, scatter, seed)
    return write_files(directory, plan, payload or RandomWeights(config, seed), files, force=force, progress=progress)
