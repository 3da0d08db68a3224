"""Values that no header shows, counted in a piece of a tensor. Pure numpy on bytes; a clean piece costs two passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from evrun.expert_worker.wire.checkpoint.dtypes import ITEM_BYTES
from evrun.kernels.formats import E8M0_NAN

U8 = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

PAGE_BYTES = 4096
"""What a file system or a network hands over at least: a hole in a file is this much of nothing."""
ROW_DTYPES = ("I8", "F8_E4M3", "F8_E8M0")
"""Codes and scales: whole rows of zeros are looked for in these."""
KINDS = ("E8M0 byte 255 (NaN)", "NaN code of E4M3", "infinity or NaN", "E8M0 byte 0", "all-zero row")
BAD = KINDS[:3]
"""No kernel can use them."""


@dataclass
class Findings:
    """Of one tensor. `counts` and `first` (flat element, or row for all-zero rows) by kind."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    zero_run_bytes: int = 0
    """Longest run of all-zero rows."""
    _run_rows: int = 0

    def note(self, kind: str, count: int, first: int) -> None:
        if count:
            self.first.setdefault(kind, first)
            self.counts[kind] = self.counts.get(kind, 0) + count

    def zero_rows(self, mask: Mask, before: int, row_bytes: int) -> None:
        """Rows of a piece that are zero, with `before` rows ahead of it."""
        there = np.flatnonzero(mask)
        if not len(there):
            self._run_rows = 0
            return
        self.note(KINDS[4], len(there), before + int(there[0]))
        # Runs are between the rows that are not zero; the first one may go on from the piece before.
        edges = np.flatnonzero(~mask)
        if not len(edges):
            self._run_rows += len(mask)
            longest = self._run_rows
        else:
            head, tail = self._run_rows + int(edges[0]), len(mask) - 1 - int(edges[-1])
            longest = max(head, tail, int(np.diff(edges).max(initial=1)) - 1)
            self._run_rows = tail
        self.zero_run_bytes = max(self.zero_run_bytes, longest * row_bytes)


def scan(piece: U8, dtype: str, before: int, row_bytes: int, found: Findings) -> None:
    """Count what is odd in a piece of a tensor.

    piece      whole rows; memory of its own, aligned to 8 bytes
    before     bytes of the tensor ahead of it
    row_bytes  0 for a tensor without rows (one dimension): no look for all-zero rows then
    """
    base = before // ITEM_BYTES.get(dtype, 1)
    if dtype == "F8_E8M0":
        if piece.max(initial=0) == E8M0_NAN:
            _note(found, KINDS[0], base, lambda: piece == E8M0_NAN)
        if piece.min(initial=255) == 0:
            _note(found, KINDS[3], base, lambda: piece == 0)
    elif dtype == "F8_E4M3":
        magnitude = piece & 0x7F
        if magnitude.max(initial=0) == 0x7F:
            _note(found, KINDS[1], base, lambda: magnitude == 0x7F)
    elif dtype in ("BF16", "F32"):
        bits, exponent = ("<u2", 0x7F80) if dtype == "BF16" else ("<u4", 0x7F800000)
        words = piece.view(bits) & exponent
        if words.max(initial=0) == exponent:
            _note(found, KINDS[2], base, lambda: words == exponent)
    if row_bytes and dtype in ROW_DTYPES:
        found.zero_rows(zero_rows(piece, row_bytes), before // row_bytes, row_bytes)


def zero_rows(piece: U8, row_bytes: int) -> Mask:
    """[n] which rows hold nothing but zeros. Looks at the beginning of every row, then only at those that begin with zeros."""
    rows = piece.reshape(-1, row_bytes)
    mask: Mask
    if row_bytes % 8 == 0:
        first: npt.NDArray[np.uint64] = piece.view(np.uint64)[:: row_bytes // 8]
        mask = ~first.astype(np.bool_)
    else:
        mask = np.asarray(~rows[:, : min(8, row_bytes)].any(axis=1))
    maybe = np.flatnonzero(mask)
    if len(maybe):
        mask[maybe] = ~rows[maybe].any(axis=1)
    return mask


def _note(found: Findings, kind: str, base: int, mask: Callable[[], Mask]) -> None:
    there = mask()
    found.note(kind, int(np.count_nonzero(there)), base + int(there.argmax()))
