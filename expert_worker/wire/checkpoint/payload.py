"""Values that no header shows and no kernel can use: checked when a tensor is first used, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from evrun.expert_worker.wire.checkpoint.reader import Tensor
from evrun.expert_worker.wire.errors import PayloadError

PIECE_BYTES = 1 << 20
E8M0_NAN = 255

Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]


def check_scales(tensor: Tensor) -> None:
    """Raises PayloadError when an F8_E8M0 tensor holds byte 255, which means NaN."""
    _scan(tensor, 1, lambda piece: piece == E8M0_NAN, "E8M0 byte 255 (NaN)")


def check_e4m3(tensor: Tensor) -> None:
    """Raises PayloadError when an F8_E4M3 tensor holds 0x7F or 0xFF, its two NaN codes."""
    _scan(tensor, 1, lambda piece: (piece & 0x7F) == 0x7F, "NaN code of E4M3")


def check_finite(tensor: Tensor) -> None:
    """Raises PayloadError when a BF16 or F32 tensor holds an infinity or NaN."""
    if tensor.dtype == "BF16":
        _scan(tensor, 2, lambda piece: (piece.view("<u2") & 0x7F80) == 0x7F80, "infinity or NaN in BF16")
    elif tensor.dtype == "F32":
        _scan(tensor, 4, lambda piece: (piece.view("<u4") & 0x7F800000) == 0x7F800000, "infinity or NaN in F32")


def check_payload(tensor: Tensor) -> None:
    """The check for the tensor's own dtype; packed E2M1 (I8) has no bad codes. Raises PayloadError."""
    checks: dict[str, Callable[[Tensor], None]] = {"F8_E8M0": check_scales, "F8_E4M3": check_e4m3}
    checks.get(tensor.dtype, check_finite)(tensor)


def _scan(tensor: Tensor, item: int, bad: Callable[[Bytes], npt.NDArray[Any]], what: str) -> None:
    """Find the first bad element; `bad` gets at most PIECE_BYTES at once and answers per element of `item` bytes."""
    flat = tensor.data.reshape(-1)
    for start in range(0, flat.size, PIECE_BYTES):
        mask: Mask = bad(flat[start : start + PIECE_BYTES])
        if mask.any():
            element = start // item + int(mask.argmax())
            columns = tensor.shape[-1] if tensor.shape else 1
            row, column = divmod(element, columns) if len(tensor.shape) > 1 else (element, 0)
            where = f"{tensor.shard}: {tensor.name}, row {row}, column {column}"
            raise PayloadError(f"{where}: {what}; the file is damaged or was written wrongly: copy it again")
