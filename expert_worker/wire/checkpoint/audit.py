"""Index, headers and schema against each other. Pure: nothing here touches a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.header import Entry, shown
from evrun.expert_worker.wire.checkpoint.schema import EXPERT_PARTS, Spec, expert_name, expert_specs, is_skipped, other_specs


class Place(NamedTuple):
    """Where a tensor that is no routed expert lies. `offset` is bytes from the start of the shard."""

    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int


class Findings:
    """Problem lines; equal findings about many tensors of one shard become one line that counts them."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], tuple[str, int]] = {}

    def add(self, where: str, what: str, tensor: str) -> None:
        first, count = self._lines.get((where, what), (tensor, 0))
        self._lines[where, what] = (first, count + 1)

    def lines(self) -> list[str]:
        return [
            f"{where}: {shown(first)}{f' and {count - 1} more' if count > 1 else ''}: {what}"
            for (where, what), (first, count) in self._lines.items()
        ]


class Catalog:
    """Offsets of every tensor that the index names, filled shard by shard, and what does not fit.

    Experts take 16 bytes a tensor in two arrays [layers, experts, 6]; only the others are objects.
    """

    def __init__(self, config: ModelConfig, weight_map: Mapping[str, str]) -> None:
        self.others: dict[str, Place] = {}
        shape = (config.num_hidden_layers, config.n_routed_experts, len(EXPERT_PARTS))
        self.expert_offsets: npt.NDArray[np.int64] = np.zeros(shape, np.int64)
        self.expert_shards: npt.NDArray[np.int64] = np.full(shape, -1, np.int64)
        self.findings = Findings()
        self.tensor_bytes = 0
        self._specs: dict[str, Spec] = other_specs(config)
        self._expert_specs = expert_specs(config)
        self._parts = len(EXPERT_PARTS)
        names = (
            expert_name(layer, expert, part)
            for layer in range(config.num_hidden_layers)
            for expert in range(config.n_routed_experts)
            for part in EXPERT_PARTS
        )
        self._experts = {name: i for i, name in enumerate(names)}
        self._weight_map = weight_map

    def check_names(self, index: str) -> None:
        """Names the schema wants and the index lacks, and the other way round."""
        for wanted in (self._specs, self._experts):
            for name in wanted:
                if name not in self._weight_map:
                    self.findings.add(index, "missing: this model needs it; copy the checkpoint again or correct the config", name)
        for name in self._weight_map:
            if name not in self._experts and name not in self._specs and not is_skipped(name):
                self.findings.add(index, "not a tensor of this model with this config; is it another model's checkpoint?", name)

    def take(self, where: str, shard: int, data_start: int, named: Iterable[str], entries: Mapping[str, Entry]) -> None:
        """Note the tensors that the index places in this shard (`named`), checked against its header's `entries`."""
        add, specs, experts, expert_specs = self.findings.add, self._specs, self._experts, self._expert_specs
        offsets, shards = self.expert_offsets.reshape(-1), self.expert_shards.reshape(-1)
        numbers, starts = [], []
        for name in named:
            entry = entries.get(name)
            if entry is None:
                add(where, "the index places it here, the header does not hold it; copy shard and index again", name)
                continue
            dtype, shape, start, end = entry
            self.tensor_bytes += end - start
            number = experts.get(name)
            spec = specs.get(name) if number is None else expert_specs[number % self._parts]
            if spec is not None and (dtype, shape) != spec:
                want, found = f"{spec[0]} {list(spec[1])}", f"{dtype} {list(shape)}"
                add(where, f"expected {want}, found {found}; config or shard is wrong, copy both again", name)
            elif number is not None:
                numbers.append(number)
                starts.append(start)
            else:
                self.others[name] = Place(dtype, shape, shard, data_start + start)
        offsets[numbers] = np.array(starts, np.int64) + data_start
        shards[numbers] = shard
