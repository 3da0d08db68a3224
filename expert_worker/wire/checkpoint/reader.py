"""A checkpoint directory: checked as a whole by its headers, then every tensor as a view into a mapped shard.

Nothing is copied and nothing is mapped before its first use. A tensor is found through the index alone, so a weight
and its scale may lie in different shards.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from evrun.expert_worker.wire.checkpoint.audit import Catalog
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.dtypes import ITEM_BYTES
from evrun.expert_worker.wire.checkpoint.schema import EXPERT_PARTS, expert_name, expert_specs, is_engram_table, is_skipped
from evrun.expert_worker.wire.checkpoint.shards import Identity, Shard, changed, identity_of
from evrun.expert_worker.wire.checkpoint.survey import survey
from evrun.expert_worker.wire.errors import CheckpointError

U8 = npt.NDArray[np.uint8]


class Tensor(NamedTuple):
    """One tensor where it lies."""

    name: str
    dtype: str
    """The header's string."""
    shape: tuple[int, ...]
    shard: Path
    offset: int
    """Bytes from the start of the shard."""
    data: U8
    """[*shape[:-1], bytes of the last dimension]: read-only, C-contiguous, a view into the mapping. Only byte-aligned."""


Expert = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Checkpoint:
    """An opened checkpoint. Not safe for use by several threads during the first use of a shard."""

    def __init__(self, directory: Path, config: ModelConfig, shards: list[Shard], catalog: Catalog, warnings: list[str]) -> None:
        """Use `open`."""
        self.directory = directory
        self.config = config
        self.warnings = warnings
        """What is odd and does no harm, one line each."""
        self._paths = [s.path for s in shards]
        self._resolved = [s.resolved for s in shards]
        self._identities = [s.identity for s in shards]
        self._maps: list[mmap.mmap | None] = [None] * len(shards)
        self._others = catalog.others
        self._numbering = catalog.numbering
        self._expert_offsets = catalog.expert_offsets
        self._expert_shards = catalog.expert_shards
        self._expert_parts = [
            (part, dtype, shape, _view_shape(dtype, shape)) for part, (dtype, shape) in zip(EXPERT_PARTS, expert_specs(config), strict=True)
        ]
        dense = [(p.shard, p.offset, n) for n, p in self._others.items() if not is_skipped(n) and not is_engram_table(n)]
        self.dense_names = tuple((n, _bytes(self._others[n].dtype, self._others[n].shape)) for _, _, n in sorted(dense))
        """(name, bytes) of every tensor that is neither a routed expert nor an Engram table nor skipped, in file order."""
        self.dense_bytes = sum(size for _, size in self.dense_names)
        self.engram_bytes = sum(_bytes(p.dtype, p.shape) for n, p in self._others.items() if is_engram_table(n) and not is_skipped(n))
        """Bytes of the Engram tables, of which only single rows are read."""
        self.expert_bytes = config.row_bytes * config.num_hidden_layers * config.n_routed_experts

    @classmethod
    def open(cls, directory: str | Path, identity: Mapping[str, Identity] | None = None) -> Checkpoint:
        """Read config, index and every header, and check all that these can show.

        identity: resolved shard path -> (device, inode, size, mtime_ns), as `identity()` gave it to an earlier process; a
        shard that is not the same file is refused.
        Raises CheckpointError with every problem found, one line each.
        """
        found = survey(Path(directory), identity)
        if found.problems or found.config is None or found.catalog is None:
            raise CheckpointError(str(found.directory), [p.text for p in found.problems])
        return cls(found.directory, found.config, found.shards, found.catalog, found.warnings)

    def identity(self) -> dict[str, Identity]:
        """Resolved shard path -> (device, inode, size, mtime_ns) of the files whose headers were read."""
        return dict(zip(self._resolved, self._identities, strict=True))

    def has(self, name: str) -> bool:
        return name in self._others or self._numbering.number(name) is not None

    def tensor(self, name: str) -> Tensor:
        """Any tensor of the index. Raises KeyError for an unknown name, CheckpointError when the shard was replaced."""
        place = self._others.get(name)
        if place is not None:
            shape = _view_shape(place.dtype, place.shape)
            data: U8 = np.ndarray(shape, np.uint8, self._map(place.shard), place.offset)
            return Tensor(name, place.dtype, place.shape, self._paths[place.shard], place.offset, data)
        number = self._numbering.number(name)
        if number is None:
            raise KeyError(f"{self.directory}: the checkpoint has no tensor {name}")
        layer, expert, part = (int(i) for i in np.unravel_index(number, self._expert_offsets.shape))
        return self.expert(layer, expert)[part]

    def expert(self, layer: int, expert: int) -> Expert:
        """One routed expert: w1, its scale, w3, its scale, w2, its scale. A few microseconds; nothing is kept.

        Raises IndexError for a layer or expert that the config does not have, CheckpointError when a shard was replaced.
        """
        if layer < 0 or expert < 0:
            raise IndexError(f"layer {layer}, expert {expert}")
        offsets = self._expert_offsets[layer, expert].tolist()
        shards = self._expert_shards[layer, expert].tolist()
        prefix = expert_name(layer, expert, "")
        found = []
        for i, (part, dtype, shape, view) in enumerate(self._expert_parts):
            shard, offset = shards[i], offsets[i]
            data: U8 = np.ndarray(view, np.uint8, self._maps[shard] or self._map(shard), offset)
            found.append(Tensor(prefix + part, dtype, shape, self._paths[shard], offset, data))
        w1, s1, w3, s3, w2, s2 = found
        return w1, s1, w3, s3, w2, s2

    def mapping(self, shard: Path) -> U8:
        """A whole shard, as `Tensor.shard` names it: read-only bytes [file size]."""
        return np.frombuffer(self._map(self._paths.index(shard)), np.uint8)

    def _map(self, shard: int) -> mmap.mmap:
        found = self._maps[shard]
        if found is None:
            found = self._maps[shard] = _open_map(self._paths[shard], self._identities[shard])
        return found


def _open_map(path: Path, expected: Identity) -> mmap.mmap:
    """The whole file, read-only and shared with the page cache. Refused when it is no longer the file that was checked."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(str(path.parent), [f"{path}: cannot be opened any more ({error.strerror})"]) from error
    try:
        found = identity_of(os.fstat(fd))
        if found != expected:
            raise CheckpointError(str(path.parent), [f"{path}: {changed(expected, found)}"])
        return mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def _view_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    item = ITEM_BYTES[dtype]
    return (*shape[:-1], shape[-1] * item) if shape else (item,)


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(_view_shape(dtype, shape))
