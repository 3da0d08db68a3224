"""Partials, or rows, -> the routed sum of a layer call. Pure, fp32, in one order whoever answered first.

Both have a native way (csrc/exchange.cpp) and one in numpy for where the library is missing; their bits are the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from evrun.expert_worker.wire import exchange


class Share(NamedTuple):
    """What one rank gave for some experts of a call."""

    rank: int
    experts: list[int]
    """Ascending."""
    result: npt.NDArray[Any]
    """Partial: [T, H] fp32. Rows: [n, H] activation dtype (bf16 as uint16), per expert ascending, per token ascending."""
    at: int = 0
    """Address of the result, where it is known: asking numpy costs as much as adding it."""

    def address(self) -> int:
        return self.at or address_of(self.result)


def combine_partials(shares: Sequence[Share], out: npt.NDArray[np.float32]) -> bool:
    """out [T, H] fp32, overwritten: the partials added in rank order. Returns whether every sum is finite."""
    ordered = sorted(shares, key=lambda s: (s.rank, s.experts[0]))
    library = exchange.load()
    if library is None:
        np.copyto(out, ordered[0].result)
        for share in ordered[1:]:
            out += share.result
        return bool(np.isfinite(out).all())
    parts = array("Q", [share.address() for share in ordered])
    return bool(library.evrun_add_partials(parts.buffer_info()[0], len(parts), out.size, address_of(out)))


def combine_rows(shares: Sequence[Share], ids: npt.NDArray[np.int32], out: npt.NDArray[np.float32]) -> bool:
    """out [T, H] fp32, overwritten: rows added in ascending expert id, the reference's own order.

    ids [T, K]: the experts each token chose, distinct. Bits depend on nothing but the rows and ids. Returns whether every sum
    is finite.
    """
    library = exchange.load()
    if library is None:
        return _combine_rows(shares, ids, out)
    tokens, hidden = out.shape
    draws = np.bincount(ids.ravel()).tolist() if tokens > 1 else None
    rows = array("Q", bytes(8 * (int(ids.max()) + 1)))
    itemsize = shares[0].result.itemsize
    for share in shares:
        address = share.address()
        for expert in share.experts:
            rows[expert] = address
            address += (draws[expert] if draws else 1) * hidden * itemsize
    where = rows.buffer_info()[0]
    return bool(library.evrun_add_rows(where, address_of(ids), tokens, ids.shape[1], hidden, itemsize, address_of(out)))


def _combine_rows(shares: Sequence[Share], ids: npt.NDArray[np.int32], out: npt.NDArray[np.float32]) -> bool:
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
    return bool(np.isfinite(out).all())


def widen(rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Activation values -> fp32; raw bf16 bits (uint16) become the upper half of the fp32 bits."""
    if rows.dtype == np.float32:
        return rows
    return (rows.astype(np.uint32) << 16).view(np.float32)


def address_of(values: npt.NDArray[Any]) -> int:
    """Of a C-contiguous array."""
    address: int = values.__array_interface__["data"][0]
    return address
