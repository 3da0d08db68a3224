"""Where the six tensors of a row go on the card, and in which copies they travel. Pure.

Tensors that follow each other in one shard travel in one copy: the release's writer puts an expert's tensors side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evrun.expert_worker.wire.checkpoint.reader import Tensor

ALIGNMENT = 256


@dataclass(frozen=True)
class Copy:
    """One range of a shard and where it lands, in bytes from the start of the row's slot."""

    shard: Path
    offset: int
    size_bytes: int
    to: int


@dataclass(frozen=True)
class RowLayout:
    copies: tuple[Copy, ...]
    tensors: tuple[int, ...]
    """Where w1, s1, w3, s3, w2, s2 begin, in bytes from the start of the slot."""


def slot_bytes(row_bytes: int) -> int:
    """Room of a slot: the row, and each of its tensors may begin on an aligned byte."""
    return -(-(row_bytes + 6 * ALIGNMENT) // ALIGNMENT) * ALIGNMENT


def lay_out(tensors: Sequence[Tensor]) -> RowLayout:
    """`tensors`: w1, s1, w3, s3, w2, s2 of one expert, wherever they lie."""
    order = sorted(range(len(tensors)), key=lambda i: (str(tensors[i].shard), tensors[i].offset))
    copies: list[Copy] = []
    places = [0] * len(tensors)
    end = 0
    for i in order:
        tensor = tensors[i]
        last = copies[-1] if copies else None
        follows = last is not None and last.shard == tensor.shard and last.offset + last.size_bytes == tensor.offset
        if last is not None and follows and end % 16 == 0:
            copies[-1] = Copy(last.shard, last.offset, last.size_bytes + tensor.data.nbytes, last.to)
        else:
            end = -(-end // ALIGNMENT) * ALIGNMENT
            copies.append(Copy(tensor.shard, tensor.offset, tensor.data.nbytes, end))
        places[i] = end
        end += tensor.data.nbytes
    return RowLayout(tuple(copies), tuple(places))
