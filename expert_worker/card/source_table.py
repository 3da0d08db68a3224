"""Where rows lie on the host, as native code reads it (kernels/native/csrc/card_issue.cpp): those that it may bring in itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from evrun.expert_worker.card.layout import RowLayout
from evrun.expert_worker.card.slot_table import Key
from evrun.kernels.cuda.issue import PIECES, SOURCE
from evrun.kernels.cuda.params import ROW_FIELDS

MANY_LAYOUTS = 16


class SourceTable:
    """Of `layers` x `experts` rows, as far as they are known: in registered memory, in one shard, in no more than PIECES."""

    def __init__(self, layers: int, experts: int) -> None:
        self.sources = np.zeros((layers, experts), SOURCE)
        """[layers, experts]; no piece: not known."""
        self.layouts = np.zeros((MANY_LAYOUTS, len(ROW_FIELDS)), np.int64)
        """[MANY_LAYOUTS, 6] bytes from the start of a slot to the row's tensors."""
        self._places: dict[tuple[int, ...], int] = {}
        self._in_shard: dict[Path, list[Key]] = {}

    def learn(self, key: Key, layout: RowLayout, shard_address: int) -> None:
        """shard_address: where the row's shard begins in registered memory."""
        shard = layout.copies[0].shard
        fits = len(layout.copies) <= PIECES and all(copy.shard == shard for copy in layout.copies)
        if not fits or self.sources["size_bytes"][key][0]:
            return
        number = self._places.get(layout.tensors, len(self._places))
        if number == MANY_LAYOUTS:
            return
        self._places[layout.tensors] = number
        self.layouts[number] = layout.tensors
        pieces = [(shard_address + copy.offset, copy.size_bytes, copy.to) for copy in layout.copies]
        pieces += [(0, 0, 0)] * (PIECES - len(pieces))
        self.sources[key] = *zip(*pieces, strict=True), number
        self._in_shard.setdefault(shard, []).append(key)

    def forget(self, shard: Path) -> None:
        """Its registration goes."""
        for key in self._in_shard.pop(shard, ()):
            self.sources[key] = 0
