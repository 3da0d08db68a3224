"""Small checkpoints and ways to damage them: for tests of everything that reads a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.launch.export import geometry
from evrun.launch.export.checkpoint import complete, write_checkpoint

Json = dict[str, Any]


def mini_config(**overrides: Any) -> ModelConfig:
    """Three layers (ratios 0, 2, 1), four experts, Engram on layer 1; no two sizes equal."""
    return complete(geometry.values("tiny", **{"num_hidden_layers": 3, "n_routed_experts": 4, **overrides}))


def write_mini(directory: Path, *, scatter: int = 0, layout: Any = "nested", seed: int = 0, **overrides: Any) -> ModelConfig:
    config = mini_config(**overrides)
    write_checkpoint(config, directory, seed, scatter=scatter, layout=layout)
    return config


def read_header(shard: Path) -> Json:
    raw = shard.read_bytes()
    header: Json = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return header


def rewrite_header(shard: Path, edit: Callable[[Json], Any]) -> None:
    """Change the JSON of a header in place of the old one; the tensors stay."""
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header = edit(header) or header
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def rewrite_json(path: Path, edit: Callable[[Json], Any]) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps(edit(document) or document))


def index(directory: Path) -> Json:
    found: Json = json.loads((directory / "model.safetensors.index.json").read_text())
    return found


def shard_of(directory: Path, tensor: str) -> Path:
    return directory / index(directory)["weight_map"][tensor]


def poke(directory: Path, tensor: str, byte: int, value: int) -> None:
    """Overwrite one byte of a tensor's payload."""
    shard = shard_of(directory, tensor)
    raw = shard.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little") + read_header(shard)[tensor]["data_offsets"][0]
    with shard.open("r+b") as file:
        file.seek(start + byte)
        file.write(bytes([value]))


class Raw:
    """A checkpoint's bytes, read by other code than the one under test."""

    def __init__(self, directory: Path) -> None:
        self.weight_map: dict[str, str] = index(directory)["weight_map"]
        shards = {directory / name for name in self.weight_map.values()}
        self._files = {p.name: (p.read_bytes(), read_header(p)) for p in shards}

    def __getitem__(self, tensor: str) -> bytes:
        raw, header = self._files[self.weight_map[tensor]]
        base = 8 + int.from_bytes(raw[:8], "little")
        start, end = header[tensor]["data_offsets"]
        return raw[base + start : base + end]
