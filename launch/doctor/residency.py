"""How much of a checkpoint's routed experts lies in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from evrun.expert_worker.wire.checkpoint.reader import Checkpoint

WINDOW_BYTES = 1 << 30
U8 = npt.NDArray[np.uint8]


def expert_share(checkpoint: Checkpoint) -> float | None:
    """Share of the routed experts' bytes that is resident, 0 to 1. None where the kernel does not tell: files of another
    user that may not be written to."""
    extents: dict[Path, list[tuple[int, int]]] = {}
    config = checkpoint.config
    for layer in range(config.num_hidden_layers):
        for expert in range(config.n_routed_experts):
            for tensor in checkpoint.expert(layer, expert):
                extents.setdefault(tensor.shard, []).append((tensor.offset, tensor.offset + tensor.data.nbytes))
    if not all(_may_ask(shard) for shard in extents):
        return None
    resident = total = 0.0
    for shard, ranges in extents.items():
        bounds = np.array(ranges, np.int64)
        pages = np.concatenate([[0], np.cumsum(resident_pages(checkpoint.mapping(shard)))])
        first, last = bounds[:, 0] // mmap.PAGESIZE, -(-bounds[:, 1] // mmap.PAGESIZE)
        sizes = bounds[:, 1] - bounds[:, 0]
        resident += float(((pages[last] - pages[first]) / np.maximum(last - first, 1) * sizes).sum())
        total += float(sizes.sum())
    return resident / total


def resident_pages(mapping: U8) -> npt.NDArray[np.bool_]:
    """[pages] of a whole mapping. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = -(-len(mapping) // mmap.PAGESIZE)
    found = np.zeros(pages, np.uint8)
    step = WINDOW_BYTES // mmap.PAGESIZE
    for start in range(0, pages, step):
        count = min(step, pages - start)
        address = mapping.ctypes.data + start * mmap.PAGESIZE
        part = found[start : start + count]
        size = min(count * mmap.PAGESIZE, len(mapping) - start * mmap.PAGESIZE)
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(part.ctypes.data)):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    return (found & 1).astype(bool)


def _may_ask(shard: Path) -> bool:
    """Since Linux 5.2 every page of a file that one neither owns nor may write counts as resident: no answer at all."""
    return os.stat(shard).st_uid == os.geteuid() or os.access(shard, os.W_OK)
