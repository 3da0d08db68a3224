"""The one layout of the shared memory between the coordinator and the workers.

Two kinds of memory, both memfds that the launcher makes and hands down by descriptor:

    calls (one per run; the coordinator writes, every rank reads)
        request cell of rank 0 | request cell of rank 1 | ... | slot 0 | slot 1
        slot: x [T, H] activation dtype | ids [T, K] int32 | weights [T, K] fp32
    replies (one per rank; only that rank's incarnation writes, others read)
        progress record (heartbeat.RECORD_BYTES) | reply cell | result
        result: partial [T, H] fp32, or with combine `exact` rows [n, H] activation dtype, n <= T * K

A cell holds one message: turn and length (int64 each), then the bytes; only the doorbell transport uses cells. T is the
prefill chunk; nothing is allocated per token. Offsets are multiples of 4096.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.errors import DeviceError
from evrun.expert_worker.wire.heartbeat import RECORD_BYTES

SLOTS = 2
PAGE = 4096
_HEAD_BYTES = 16


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


@dataclass(frozen=True)
class SlotLayout:
    """Sizes and offsets in bytes, fixed when a run starts."""

    world_size: int
    tokens: int
    """T: most tokens of one call."""
    hidden: int
    top_k: int
    itemsize: int
    """Bytes of an activation value: 2 (bfloat16) or 4 (float32)."""
    exact: bool
    num_experts: int

    @classmethod
    def of(cls, config: ModelConfig, world_size: int, chunk: int, dtype: str, combine: str) -> SlotLayout:
        itemsize = 2 if dtype == "bfloat16" else 4
        return cls(world_size, chunk, config.hidden_size, config.num_experts_per_tok, itemsize, combine == "exact", config.n_routed_experts)

    @property
    def cell_bytes(self) -> int:
        """A message with every expert of a layer fits: at most 5 bytes an id, and 2 KiB for the rest and error texts."""
        return _pages(5 * self.num_experts + 2048)

    @property
    def _route_bytes(self) -> int:
        return _pages(self.tokens * self.top_k * 4)

    @property
    def slot_bytes(self) -> int:
        return self.weights_at + self._route_bytes

    @property
    def call_bytes(self) -> int:
        return self.world_size * self.cell_bytes + SLOTS * self.slot_bytes

    @property
    def result_bytes(self) -> int:
        """Exact: every (token, expert) row of a call may fall to one rank; partial: one fp32 row per token."""
        if self.exact:
            return _pages(self.tokens * self.top_k * self.hidden * self.itemsize)
        return _pages(self.tokens * self.hidden * 4)

    @property
    def reply_bytes(self) -> int:
        return RECORD_BYTES + self.cell_bytes + self.result_bytes

    @property
    def ids_at(self) -> int:
        """Of a slot; its activation lies at its start."""
        return _pages(self.tokens * self.hidden * self.itemsize)

    @property
    def weights_at(self) -> int:
        return self.ids_at + self._route_bytes

    def slot_offset(self, slot: int) -> int:
        assert 0 <= slot < SLOTS
        return self.world_size * self.cell_bytes + slot * self.slot_bytes

    @property
    def activation(self) -> npt.DTypeLike:
        """numpy dtype of activations: raw bf16 bits as uint16."""
        return np.uint16 if self.itemsize == 2 else np.float32


def map_memory(fd: int, size: int, writable: bool) -> mmap.mmap:
    """Map a memfd of the run. Raises DeviceError when it is shorter than the layout says."""
    found = os.fstat(fd).st_size
    if found < size:
        raise DeviceError(f"slot memory: expected {size} bytes, found {found}; the processes of this run disagree on their settings")
    return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))


def address_of(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


class CallMemory:
    """Views into the calls memory. Arrays are numpy; a view of fewer tokens is a leading slice."""

    def __init__(self, layout: SlotLayout, fd: int, writable: bool) -> None:
        self.layout = layout
        self._map = map_memory(fd, layout.call_bytes, writable)
        self.memory = memoryview(self._map)
        self.address = address_of(self._map)
        self._single: dict[int, tuple[npt.NDArray[Any], npt.NDArray[np.int32], npt.NDArray[np.float32]]] = {}

    def cell(self, rank: int) -> Cell:
        start = rank * self.layout.cell_bytes
        return Cell(self.memory[start : start + self.layout.cell_bytes], self.address + start)

    def x(self, slot: int, tokens: int) -> npt.NDArray[Any]:
        """[tokens, H] activation dtype."""
        return self._array(slot, 0, self.layout.activation, (tokens, self.layout.hidden))

    def ids(self, slot: int, tokens: int) -> npt.NDArray[np.int32]:
        """[tokens, K] int32."""
        return self._array(slot, self.layout.ids_at, np.int32, (tokens, self.layout.top_k))

    def weights(self, slot: int, tokens: int) -> npt.NDArray[np.float32]:
        """[tokens, K] fp32."""
        return self._array(slot, self.layout.weights_at, np.float32, (tokens, self.layout.top_k))

    def views(self, slot: int, tokens: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """x, ids and weights of a call. Views for one token are kept: decode asks for them at every layer."""
        if tokens != 1:
            return self.x(slot, tokens), self.ids(slot, tokens), self.weights(slot, tokens)
        if slot not in self._single:
            self._single[slot] = self.x(slot, 1), self.ids(slot, 1), self.weights(slot, 1)
        return self._single[slot]

    def _array(self, slot: int, offset: int, dtype: npt.DTypeLike, shape: tuple[int, int]) -> npt.NDArray[Any]:
        assert 0 < shape[0] <= self.layout.tokens, shape
        array: npt.NDArray[Any] = np.ndarray(shape, dtype, self._map, self.layout.slot_offset(slot) + offset)
        return array


class ReplyMemory:
    """Views into one rank's reply memory."""

    def __init__(self, layout: SlotLayout, fd: int, writable: bool) -> None:
        self.layout = layout
        self._map = map_memory(fd, layout.reply_bytes, writable)
        self.memory = memoryview(self._map)
        self._single: npt.NDArray[np.float32] | None = None
        self.record = self.memory[:RECORD_BYTES]
        self.address = address_of(self._map)
        """Of the record, which comes first."""
        self.cell = Cell(self.memory[RECORD_BYTES : RECORD_BYTES + layout.cell_bytes], self.address + RECORD_BYTES)
        self.result_address = self.address + RECORD_BYTES + layout.cell_bytes

    def partial(self, tokens: int) -> npt.NDArray[np.float32]:
        """[tokens, H] fp32. The view for one token is kept: decode asks for it at every layer."""
        if tokens != 1:
            return self._array(np.float32, tokens)
        if self._single is None:
            self._single = self._array(np.float32, 1)
        return self._single

    def rows(self, count: int) -> npt.NDArray[Any]:
        """[count, H] activation dtype."""
        return self._array(self.layout.activation, count)

    def _array(self, dtype: npt.DTypeLike, rows: int) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = np.ndarray((rows, self.layout.hidden), dtype, self._map, RECORD_BYTES + self.layout.cell_bytes)
        assert array.nbytes <= self.layout.result_bytes, (rows, dtype)
        return array


class Cell:
    """One message in shared memory. `turn` grows with every message and is written last, so that a reader may spin on it
    (where stores are seen in order); the doorbell, a system call, orders the bytes for one that sleeps.

    The two words of the head are items of a memoryview: each is one store. (struct.pack_into zeroes its range first, and
    a reader beside it would see that.)
    """

    def __init__(self, memory: memoryview, address: int) -> None:
        """`address`: where the memory lies, for native code."""
        self._memory, self.address = memory, address
        self.capacity = len(memory) - _HEAD_BYTES
        self._head = memory[:_HEAD_BYTES].cast("q")

    def turn(self) -> int:
        turn: int = self._head[0]
        return turn

    def write(self, data: bytes) -> None:
        assert len(data) <= self.capacity, len(data)
        self._memory[_HEAD_BYTES : _HEAD_BYTES + len(data)] = data
        self._head[1] = len(data)
        self._head[0] += 1

    def read(self) -> bytes:
        """The bytes, whatever they are; a length that cannot be gives an empty message, which no codec accepts."""
        length = self._head[1]
        if not 0 <= length <= self.capacity:
            return b""
        return bytes(self._memory[_HEAD_BYTES : _HEAD_BYTES + length])
