"""Index, headers and schema against each other. Pure: nothing here touches a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.header import I64, Header, Spec, shown
from evrun.expert_worker.wire.checkpoint.schema import EXPERT_PARTS, expert_name, expert_specs, is_skipped, other_specs

PARTS = len(EXPERT_PARTS)


class Place(NamedTuple):
    """Where a tensor that is no routed expert lies. `offset` is bytes from the start of the shard."""

    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int


class Findings:
    """Problem lines; equal findings about many tensors of one place become one line that counts them."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], tuple[str, int]] = {}

    def add(self, where: str, what: str, tensor: str) -> None:
        first, count = self._lines.get((where, what), (tensor, 0))
        self._lines[where, what] = (first, count + 1)

    def by_place(self) -> list[tuple[str, str]]:
        """(where, line) of every finding."""
        return [
            (where, f"{where}: {shown(first)}{f' and {count - 1} more' if count > 1 else ''}: {what}")
            for (where, what), (first, count) in self._lines.items()
        ]


@dataclass
class Named:
    """What the index places in one shard. `numbers` are the flat numbers of `experts` in [layers, experts, 6]."""

    experts: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.experts) + len(self.others)


class Numbering:
    """Flat number of an expert tensor's name, for one geometry."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._layers = {str(i): i * num_experts * PARTS for i in range(num_layers)}
        self._experts = {str(i): i * PARTS for i in range(num_experts)}
        self._parts = {part: i for i, part in enumerate(EXPERT_PARTS)}

    def number(self, name: str) -> int | None:
        """None when the name is not that of an expert tensor of this geometry."""
        fields = name.split(".", 5)
        if len(fields) < 6 or fields[3] != "experts" or fields[2] != "ffn" or fields[0] != "layers":
            return None
        layer, expert, part = self._layers.get(fields[1]), self._experts.get(fields[4]), self._parts.get(fields[5])
        return None if layer is None or expert is None or part is None else layer + expert + part


class Catalog:
    """Offsets of every tensor that the index names, filled shard by shard, and what does not fit.

    Experts take 16 bytes a tensor in two arrays [layers, experts, 6]; only the others are objects.
    """

    def __init__(self, config: ModelConfig) -> None:
        shape = (config.num_hidden_layers, config.n_routed_experts, PARTS)
        self.others: dict[str, Place] = {}
        self.expert_offsets: I64 = np.zeros(shape, np.int64)
        self.expert_shards: I64 = np.full(shape, -1, np.int64)
        self.numbering = Numbering(config.num_hidden_layers, config.n_routed_experts)
        self.findings = Findings()
        self.tensor_bytes = 0
        self._specs = other_specs(config)
        self._expert_specs = expert_specs(config)

    def sort(self, weight_map: Mapping[str, str], index: str) -> dict[str, Named]:
        """Shard file name -> what the index places there. Names that the schema wants and the index lacks, and names that
        no such model has, become findings."""
        by_shard: dict[str, Named] = {}
        number_of = self.numbering.number
        for name, file in weight_map.items():
            named = by_shard.get(file)
            if named is None:
                named = by_shard[file] = Named()
            number = number_of(name)
            if number is not None:
                named.experts.append(name)
                named.numbers.append(number)
                continue
            named.others.append(name)
            if name not in self._specs and not is_skipped(name):
                self.findings.add(index, "not a tensor of this model with this config; is it another model's checkpoint?", name)
        lacking = "missing: this model needs it; copy the checkpoint again or correct the config"
        for name in self._specs:
            if name not in weight_map:
                self.findings.add(index, lacking, name)
        there = np.zeros(self.expert_shards.size, bool)
        for named in by_shard.values():
            there[named.numbers] = True
        for number in np.flatnonzero(~there).tolist():
            self.findings.add(index, lacking, self._name(number))
        return by_shard

    def take(self, where: str, shard: int, named: Named, header: Header) -> None:
        """Note the tensors that the index places in this shard, checked against its (sound) header."""
        position = {name: i for i, name in enumerate(header.names)}
        for name in named.others:
            at = position.get(name)
            if at is None:
                self._absent(where, name)
                continue
            kind = header.kinds[header.kind_of[at]]
            self._compare(where, name, self._specs.get(name, kind), kind)
            self.others[name] = Place(kind[0], kind[1], shard, header.data_start + int(header.starts[at]))
            self.tensor_bytes += int(header.ends[at] - header.starts[at])
        if not named.experts:
            return
        at_all = np.array([position.get(name, -1) for name in named.experts], np.int64)
        numbers = np.array(named.numbers, np.int64)
        for i in np.flatnonzero(at_all < 0).tolist():
            self._absent(where, named.experts[i])
        at_all, numbers = at_all[at_all >= 0], numbers[at_all >= 0]
        known = {kind: i for i, kind in enumerate(header.kinds)}
        wanted = np.array([known.get(spec, -1) for spec in self._expert_specs], np.int64)
        for i in np.flatnonzero(header.kind_of[at_all] != wanted[numbers % PARTS]).tolist():
            spec = self._expert_specs[numbers[i] % PARTS]
            self._compare(where, self._name(int(numbers[i])), spec, header.kinds[header.kind_of[at_all[i]]])
        self.expert_offsets.reshape(-1)[numbers] = header.starts[at_all] + header.data_start
        self.expert_shards.reshape(-1)[numbers] = shard
        self.tensor_bytes += int((header.ends[at_all] - header.starts[at_all]).sum())

    def _absent(self, where: str, name: str) -> None:
        self.findings.add(where, "the index places it here, the header does not hold it; copy shard and index again", name)

    def _compare(self, where: str, name: str, spec: Spec, kind: Spec) -> None:
        if spec != kind:
            want, found = f"{spec[0]} {list(spec[1])}", f"{kind[0]} {list(kind[1])}"
            self.findings.add(where, f"expected {want}, found {found}; config or shard is wrong, copy both again", name)

    def _name(self, number: int) -> str:
        layer, expert, part = (int(i) for i in np.unravel_index(number, self.expert_shards.shape))
        return expert_name(layer, expert, EXPERT_PARTS[part])
