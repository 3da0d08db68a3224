"""Partials, or rows, -> the routed sum of a layer call. Pure, fp32, in one order whoever answered first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Share:
    """What one rank gave for some experts of a call."""

    rank: int
    experts: list[int]
    """Ascending."""
    result: npt.NDArray[Any]
    """Partial: [T, H] fp32. Rows: [n, H] activation dtype (bf16 as uint16), per expert ascending, per token ascending."""


def combine_partials(shares: Sequence[Share], out: npt.NDArray[np.float32]) -> None:
    """out [T, H] fp32, overwritten: the partials added in rank order."""
    ordered = sorted(shares, key=lambda s: (s.rank, s.experts[0]))
    np.copyto(out, ordered[0].result)
    for share in ordered[1:]:
        out += share.result


def combine_rows(shares: Sequence[Share], ids: npt.NDArray[np.int32], out: npt.NDArray[np.float32]) -> None:
    """out [T, H] fp32, overwritten: rows added in ascending expert id, the reference's own order.

    ids [T, K]: the experts each token chose. Bits depend on nothing but the rows and ids.
    """
    blocks: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[Any]]] = {}
    for share in shares:
        start = 0
        for expert in share.experts:
            tokens = np.nonzero(ids == expert)[0]
            blocks[expert] = tokens, share.result[start : start + len(tokens)]
            start += len(tokens)
    out[:] = 0
    for expert in sorted(blocks):
        tokens, rows = blocks[expert]
        out[tokens] += widen(rows)


def widen(rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Activation values -> fp32; raw bf16 bits (uint16) become the upper half of the fp32 bits."""
    if rows.dtype == np.float32:
        return rows
    return (rows.astype(np.uint32) << 16).view(np.float32)
