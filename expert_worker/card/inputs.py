"""What a call brings beside its rows: activations and route, once in pinned memory and once on the card."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.kernels import cuda
from evrun.kernels.cuda.params import ROW_BYTES


class Inputs:
    """The input block of a call, once in pinned memory and once on the card: x, ids, weights, experts, row addresses."""

    def __init__(self, device: cuda.CompilingDevice, tokens: int, config: ModelConfig, itemsize: int) -> None:
        self._hidden, self._top_k, self._itemsize = config.hidden_size, config.num_experts_per_tok, itemsize
        self._experts = config.n_routed_experts
        size = self._offsets(tokens)[-1]
        self._device, self._host, self._card = device, device.pinned(size), device.allocate(size)

    def _offsets(self, tokens: int) -> list[int]:
        """Begin of x, ids, weights, experts, rows, and the end, in bytes."""
        sizes = (tokens * self._hidden * self._itemsize, *(2 * (tokens * self._top_k * 4,)), self._experts * 4, self._experts * ROW_BYTES)
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // 256) * 256)
        return offsets

    def write_x(self, x: npt.NDArray[Any], stream: Any) -> int:
        """Bring the activations of one token to the card. Returns their address there."""
        ctypes.memmove(self._host.address, x.ctypes.data, x.nbytes)
        self._device.copy_in(self._card.address, self._host.address, x.nbytes, stream)
        return self._card.address

    def write(self, x: npt.NDArray[Any], ids: npt.NDArray[Any], weights: npt.NDArray[Any], experts: Sequence[int]) -> list[int]:
        """Fill the pinned block, all but the row addresses. Returns the five addresses on the card."""
        offsets = self._offsets(len(x))
        for offset, values in zip(offsets, (x, ids, weights, np.asarray(experts, np.int32)), strict=False):
            ctypes.memmove(self._host.address + offset, values.ctypes.data, values.nbytes)
        self._rows_done, self._sent = offsets[4], 0
        return [self._card.address + offset for offset in offsets[:5]]

    def add_rows(self, table: npt.NDArray[np.uint64]) -> None:
        """Row addresses [n, 6] of the next run, behind those of the runs before."""
        ctypes.memmove(self._host.address + self._rows_done, table.ctypes.data, table.nbytes)
        self._rows_done += table.nbytes

    def send(self, stream: Any) -> None:
        """Copy what was written since the last send."""
        self._device.copy_in(self._card.address + self._sent, self._host.address + self._sent, self._rows_done - self._sent, stream)
        self._sent = self._rows_done

    def close(self) -> None:
        self._host.close()
        self._card.close()

    @property
    def native(self) -> tuple[Any, int]:
        """(pinned memory, address on the card) of x, for `NativeIssue`."""
        return self._host, self._card.address
