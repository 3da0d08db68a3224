"""Dense weights, packed or plain, and the product with them.

A weight hands out its rows as fp32 in pieces; a product never holds more than one piece expanded, in memory that all
products share: fresh memory for every piece would cost more than what is done with it. Both forms of a dense fp8 weight give
the same values and are cut into the same pieces, so the choice never changes a bit of a result.
"""

from __future__ import annotations

import functools
import logging
from typing import Protocol

import torch
from torch import Tensor

from evrun.coordinator.models.deepseek_v41.arithmetic import Arithmetic
from evrun.kernels import native
from evrun.kernels.formats import FP8_BLOCK
from evrun.kernels.formats_torch import dequantise_fp8_tiles, e8m0_to_float32

PIECE_ELEMENTS = 1 << 20
"""Weights expanded to fp32 at a time: 4 MiB."""
log = logging.getLogger("dense")


@functools.cache
def host_dequantiser() -> native.Dequantise | None:
    """For weights in host memory; None, with the reason in the log, where torch has to do it."""
    try:
        return native.dequantiser()
    except native.NativeLibraryError as error:
        log.warning("dense fp8 weights are expanded by torch, in about three times the time: %s", error)
        return None


class Room:
    """Host memory for one piece. Belongs to the thread that runs the model."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def of(self, rows: int, columns: int) -> Tensor:
        """[rows, columns] fp32, until the next call."""
        if self._memory.numel() < rows * columns:
            with torch.inference_mode(False):
                self._memory = torch.empty(max(PIECE_ELEMENTS, rows * columns))
        return self._memory[: rows * columns].view(rows, columns)


ROOM = Room()


class Weight(Protocol):
    """[N, K] weights, y = x W^T."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def rows(self, start: int, stop: int) -> Tensor:
        """fp32 [stop - start, K]; start is a multiple of 32. In host memory they may lie in ROOM, until the next rows."""
        ...


class PlainWeight:
    """A weight held in a torch float type."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    @property
    def shape(self) -> tuple[int, int]:
        return self._values.shape[0], self._values.shape[1]

    def rows(self, start: int, stop: int) -> Tensor:
        values = self._values[start:stop]
        if values.dtype == torch.float32 or not values.is_cpu:
            return values.float()
        return ROOM.of(*values.shape).copy_(values)


class PackedWeight:
    """A dense fp8 weight as stored: E4M3 codes and one E8M0 scale per 32 x 32 tile; expanded again at every use."""

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        """codes [N, K] uint8, scales [ceil(N/32), ceil(K/32)] uint8."""
        self._codes = codes
        self._scales = e8m0_to_float32(scales)
        self._dequantise = host_dequantiser() if codes.is_cpu and codes.is_contiguous() else None

    @property
    def shape(self) -> tuple[int, int]:
        return self._codes.shape[0], self._codes.shape[1]

    def rows(self, start: int, stop: int) -> Tensor:
        codes, scales = self._codes[start:stop], self._scales[start // FP8_BLOCK : -(-stop // FP8_BLOCK)]
        if self._dequantise is None:
            return dequantise_fp8_tiles(codes, scales)
        values = ROOM.of(*codes.shape)
        self._dequantise(codes.data_ptr(), scales.data_ptr(), len(codes), codes.shape[1], values.data_ptr())
        return values

    def to_bfloat16(self) -> PlainWeight:
        """The same weights expanded once (exact); a piece in fp32 is the only extra memory."""
        values = torch.empty(self.shape, dtype=torch.bfloat16, device=self._codes.device)
        for start, stop in pieces(self.shape):
            values[start:stop] = self.rows(start, stop)
        return PlainWeight(values)


def pieces(shape: tuple[int, int]) -> list[tuple[int, int]]:
    """Row ranges of at most PIECE_ELEMENTS weights (at least one tile high), starting at multiples of 32."""
    rows, columns = shape
    step = max(PIECE_ELEMENTS // columns // FP8_BLOCK, 1) * FP8_BLOCK
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def product(x: Tensor, weight: Weight) -> Tensor:
    """x [T, K] fp32 -> x W^T [T, N] fp32."""
    ranges = pieces(weight.shape)
    if len(ranges) == 1:
        return x @ weight.rows(*ranges[0]).T
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    for start, stop in ranges:
        out[:, start:stop] = x @ weight.rows(start, stop).T
    return out


class Linear:
    """The product and one rounding. Whether its input is rounded to E4M3 first is up to the caller (`linear_input`)."""

    def __init__(self, weight: Weight, arithmetic: Arithmetic) -> None:
        self.weight = weight
        self._arithmetic = arithmetic

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] fp32 -> [T, N] dtype."""
        return self._arithmetic.round(self.product(x))


    def product(self, x: Tensor) -> Tensor:
        """The same without the rounding: [T, N] fp32."""
        return product(x, self.weight)


class GroupedLinear:
    """Block-diagonal linear of the attention output (wo_a): group g of the input meets its own rows of the weight."""

    def __init__(self, weight: Weight, groups: int, arithmetic: Arithmetic) -> None:
        self._weight = weight
        self._groups = groups
        self._arithmetic = arithmetic

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, G * K] fp32 -> [T, N] dtype. Expands whole groups: at most max(PIECE_ELEMENTS, weights of one group)."""
        rows, columns = self._weight.shape
        per_group = rows // self._groups
        grouped = x.unflatten(1, (self._groups, columns))
        out = torch.empty(x.shape[0], rows, dtype=torch.float32, device=x.device)
        step = self._groups_at_once(per_group, columns)
        for first in range(0, self._groups, step):
            count = min(step, self._groups - first)
            weights = self._weight.rows(first * per_group, (first + count) * per_group).view(count, per_group, columns)
            for group, weight in enumerate(weights, first):
                out[:, group * per_group : (group + 1) * per_group] = grouped[:, group] @ weight.T
        return self._arithmetic.round(out)

    def _groups_at_once(self, per_group: int, columns: int) -> int:
        """Groups of one piece. Pieces must start at a tile, so groups that are no multiple of 32 rows high go in one piece."""
        if per_group % FP8_BLOCK:
            return self._groups
        return max(1, PIECE_ELEMENTS // (per_group * columns))
