"""Ordinary memory and a stream without waiting, in the place of a card's, for kernels that a host runs."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np


class HostMemory:
    """A mapping of its own: those lie high, as a card's memory does; Triton's interpreter would take a low address for 32 bits."""

    def __init__(self, size_bytes: int) -> None:
        self.array = np.frombuffer(mmap.mmap(-1, size_bytes + 16), np.uint8)
        self.array.fill(0xFF)
        self.address = self.device_address = self.array.ctypes.data

    def close(self) -> None:
        self.address = 0


class HostStream:
    handle = None

    def synchronize(self) -> None: ...


class HostSide:
    stream = HostStream()

    def __init__(self) -> None:
        self._held: list[HostMemory] = []

    def put(self, array: Any) -> int:
        memory = HostMemory(array.nbytes)
        self._held.append(memory)
        ctypes.memmove(memory.address, np.ascontiguousarray(array).ctypes.data, array.nbytes)
        return memory.address

    def get(self, address: int, like: Any) -> Any:
        result = np.empty_like(like)
        ctypes.memmove(result.ctypes.data, address, result.nbytes)
        return result

    def clear(self) -> None:
        self._held.clear()
