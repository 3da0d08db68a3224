"""Recorded inputs and outputs of the routed experts: golden folders, files of `--dump-activations`, or a run made for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from evrun.expert_worker.wire.errors import UsageError

_MOE_IN = re.compile(r"((?:greedy\.)?layers\.(\d+)\.)moe_in")
PARTS = ("moe_in", "expert_ids", "expert_weights", "moe_routed_out")
VARIANTS = ("bf16", "fp32noaq")
"""Folders of golden data that hold inputs of the experts."""


@dataclass(frozen=True)
class Recorded:
    """One recorded layer of one file."""

    where: str
    layer: int
    x: npt.NDArray[np.float32]
    """[T, H]"""
    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    routed: npt.NDArray[np.float32]
    """[T, H]: what was computed, without the shared expert."""


@dataclass(frozen=True)
class Source:
    """Recordings that belong to one checkpoint and were made by one arithmetic."""

    checkpoint: Path
    data: str
    """`bf16`, `fp32noaq` (golden), or `dump`."""
    files: tuple[Path, ...]

    def calls(self) -> Iterator[Recorded]:
        """Raises UsageError for a file that holds something else."""
        for file in self.files:
            yield from recorded(file)

    @property
    def name(self) -> str:
        return f"{self.checkpoint.parent.name}/{self.data}" if self.data in VARIANTS else self.files[0].name


def find(paths: list[Path], checkpoint: Path | None) -> list[Source]:
    """Golden folders (`checkpoint/` beside `expected/`, or a folder of such), else dump files or folders of them, which need
    `checkpoint`. Raises UsageError."""
    sources: list[Source] = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path}: expected a golden folder or a file of --dump-activations, found nothing")
        golden = [f for f in (path, *(sorted(path.iterdir()) if path.is_dir() else [])) if (f / "checkpoint").is_dir()]
        if golden:
            sources += [s for folder in golden for s in _golden(folder)]
            continue
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise UsageError(f"{path}: expected checkpoint/ and expected/, or files of --dump-activations, found neither")
        if checkpoint is None:
            raise UsageError(f"{path}: a dump does not say which checkpoint it was made with; give --checkpoint DIR")
        sources.append(Source(checkpoint, "dump", tuple(files)))
    return sources


def _golden(folder: Path) -> list[Source]:
    found = []
    for variant in VARIANTS:
        there = sorted((folder / "expected" / variant).glob("*.safetensors"))
        files = tuple(f for f in there if not f.name.endswith(".layers.safetensors"))
        if files:
            found.append(Source(folder / "checkpoint", variant, files))
    return found


def recorded(file: Path) -> Iterator[Recorded]:
    """Every recorded layer of a file, prefill and decode. Raises UsageError."""
    try:
        data: dict[str, Any] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{file}: expected a safetensors file with activations, found: {error}") from None
    matches = [m for m in map(_MOE_IN.fullmatch, sorted(data)) if m]
    if not matches:
        raise UsageError(f"{file}: expected tensors layers.N.moe_in, found none; was it written by --dump-activations?")
    for match in matches:
        prefix, layer = match.groups()
        missing = [p for p in PARTS if prefix + p not in data]
        if missing:
            raise UsageError(f"{file}: expected {prefix}{missing[0]} beside {prefix}moe_in, found none")
        x, ids, weights, routed = (data[prefix + part] for part in PARTS)
        yield Recorded(
            f"{file.stem} {prefix.rstrip('.')}", int(layer), x.astype(np.float32), ids.astype(np.int32),
            weights.astype(np.float32), routed.astype(np.float32),
        )  # fmt: skip
