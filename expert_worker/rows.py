"""Any (layer, expert) -> its packed row: views into this process's own mapping of the shards. Copies nothing."""

from __future__ import annotations

from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.kernels.api import BadScaleError, Row


class Rows:
    """The rows of a checkpoint. Pages are read when a kernel touches them; the page cache is shared by all workers."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._rows: dict[tuple[int, int], Row] = {}

    def row(self, layer: int, expert: int) -> Row:
        """The row, found through the index once."""
        key = layer, expert
        if key not in self._rows:
            self._rows[key] = Row(*(tensor.data for tensor in self._checkpoint.expert(layer, expert)))
        return self._rows[key]

    def describe(self, layer: int, expert: int, bad: BadScaleError) -> str:
        """A bad scale byte in the words of the checkpoint: tensor, row, shard."""
        scales = dict(zip(("w1", "w3", "w2"), self._checkpoint.expert(layer, expert)[1::2], strict=True))
        tensor = scales[bad.tensor]
        return (
            f"{tensor.shard}: {tensor.name} row {bad.row}: scale byte 0 to 254 expected, found 255 (not a number); "
            f"layer {layer}, expert {expert}; fetch this shard again"
        )
