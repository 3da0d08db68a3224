"""The header of one safetensors file: an 8-byte length, JSON, then the tensors without gaps.

`parse` is pure and total: whatever the bytes, it returns columns and problems, never raises. A big checkpoint has
96,000 tensors, so a sound header is checked as columns; only one with problems is walked tensor by tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from evrun.expert_worker.wire.checkpoint.dtypes import ITEM_BYTES

LENGTH_BYTES = 8
LFS_POINTER = b"version "
"""How the text file begins that `git clone` leaves where Git LFS is not installed."""
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_RANK = 8

Spec = tuple[str, tuple[int, ...]]
"""(dtype of the header, shape)."""
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Header:
    """What a header says, one column entry per tensor. With `problems` (texts without the file's name) it is empty."""

    data_start: int = 0
    names: list[str] = field(default_factory=list)
    kinds: list[Spec] = field(default_factory=list)
    """The distinct (dtype, shape) of this file."""
    kind_of: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    starts: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    ends: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    """Bytes after `data_start`."""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def shown(name: str) -> str:
    """A name out of a file as it may stand in a line for people: no control characters, bounded length."""
    return name if name.isprintable() and len(name) <= 200 else ascii(name)[:200]


def header_bytes(prefix: bytes, file_bytes: int) -> tuple[int, str]:
    """(length of the JSON part, "") from the first bytes of a file, or (0, what is wrong)."""
    if file_bytes < LENGTH_BYTES or len(prefix) < LENGTH_BYTES:
        return 0, f"expected a safetensors file, found {file_bytes} bytes (a header length alone takes {LENGTH_BYTES}); copy the file again"
    if prefix[:LENGTH_BYTES] == LFS_POINTER:
        return 0, f"expected a safetensors file, found a Git LFS pointer of {file_bytes} bytes; `git lfs pull` fetches the file itself"
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        return 0, f"expected a header of at most {MAX_HEADER_BYTES} bytes, found {length}: not a safetensors file; copy the file again"
    if LENGTH_BYTES + length > file_bytes:
        return 0, f"expected at least {LENGTH_BYTES + length} bytes for the header alone, found a file of {file_bytes}; copy the file again"
    return length, ""


def parse(text: bytes, file_bytes: int) -> Header:
    """The header of a file of `file_bytes` bytes, from its JSON part.

    Checks every entry's form, dtype x shape against its extent, extents against each other (no overlap, no hole) and
    against the file. Bytes after the last tensor are a warning: they shift nothing.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Header(problems=[f"the header is not JSON ({type(error).__name__}: {str(error)[:80]!a}); copy the file again"])
    if not isinstance(raw, dict):
        return Header(problems=[f"expected a JSON object as header, found {type(raw).__name__}; copy the file again"])
    raw.pop("__metadata__", None)
    data_start = LENGTH_BYTES + len(text)
    header = _columns(raw, data_start, file_bytes)
    if header is None:
        problems = _walk(raw, data_start, file_bytes)
        return Header(data_start, problems=problems or ["the header is malformed; copy the file again"])
    return header


def _columns(raw: Mapping[str, Any], data_start: int, file_bytes: int) -> Header | None:
    """The header when everything about it is right, else None."""
    try:
        pairs = [item["data_offsets"] for item in raw.values()]
        per_tensor = [(item["dtype"], tuple(item["shape"])) for item in raw.values()]
        kinds = {kind: i for i, kind in enumerate(dict.fromkeys(per_tensor))}
        sizes = [_size(dtype, shape)[0] for dtype, shape in kinds]
        if set(map(len, pairs)) - {2} or {type(n) for pair in pairs for n in pair} - {int} or min(sizes, default=0) < 0:
            return None
        extents = np.array(pairs, np.int64).reshape(-1, 2)
        size_of_kind = np.array(sizes, np.int64)
    except (TypeError, KeyError, ValueError, OverflowError):
        return None
    kind_of = np.array([kinds[kind] for kind in per_tensor], np.int64)
    starts, ends = extents[:, 0].copy(), extents[:, 1].copy()
    order = np.lexsort((ends, starts))
    in_order = np.concatenate([[0], ends[order]])
    used = int(in_order[-1])
    sized = bool((ends - starts == size_of_kind[kind_of]).all())
    if not sized or not (starts[order] == in_order[:-1]).all() or data_start + used > file_bytes:
        return None
    spare = file_bytes - data_start - used
    warnings = [f"{spare} bytes after the last tensor, ignored (file {file_bytes} bytes, {data_start + used} used)"] if spare else []
    return Header(data_start, list(raw), list(kinds), kind_of, starts, ends, [], warnings)


def _size(dtype: object, shape: tuple[object, ...]) -> tuple[int, str]:
    """(bytes, "") of a tensor, or (-1, what is wrong with it)."""
    item = ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
    if item is None:
        return -1, f"unknown dtype {dtype!a:.40}; known: {', '.join(ITEM_BYTES)}"
    dims = [d for d in shape[:MAX_RANK] if type(d) is int and 0 <= d < 1 << 62]
    if len(dims) != len(shape):
        return -1, f"expected a shape of at most {MAX_RANK} non-negative integers, found {list(shape)!a:.80}"
    return item * math.prod(dims), ""


def _walk(raw: Mapping[str, Any], data_start: int, file_bytes: int) -> list[str]:
    """Every problem of a header, tensor by tensor."""
    problems: list[str] = []
    sound: list[tuple[int, int, str]] = []
    for name, item in raw.items():
        try:
            dtype, shape, (start, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
        except (TypeError, KeyError, ValueError):
            problems.append(f"{shown(name)}: expected dtype, shape and two data_offsets, found {item!a:.120}")
            continue
        size, wrong = _size(dtype, shape)
        if wrong:
            problems.append(f"{shown(name)}: {wrong}")
        elif type(start) is not int or type(end) is not int or start < 0 or end < start:
            problems.append(f"{shown(name)}: expected data_offsets 0 <= start <= end, found [{start!a:.40}, {end!a:.40}]")
        elif end - start != size:
            problems.append(f"{shown(name)}: {dtype} {list(shape)} takes {size} bytes, data_offsets [{start}, {end}] hold {end - start}")
        else:
            sound.append((start, end, name))
    sound.sort()
    past_end = [name for _, end, name in sound if data_start + end > file_bytes]
    if past_end:
        needed = data_start + max(end for _, end, _ in sound)
        reach = f"{len(past_end)} tensors reach beyond the end, first {shown(past_end[0])}"
        problems.append(f"truncated: expected {needed} bytes, found {file_bytes}; {reach}; copy the file again")
    if len(sound) == len(raw):
        problems += _gaps(sound)
    return problems


def _gaps(extents: list[tuple[int, int, str]]) -> list[str]:
    """Ascending extents must follow each other without overlap or hole."""
    problems = []
    at, before = 0, "the header"
    for start, end, name in extents:
        if start != at:
            wrong = "overlap" if start < at else f"leave a hole of {start - at} bytes after"
            problems.append(f"{shown(name)}: data_offsets [{start}, {end}] {wrong} {shown(before)}, which ends at {at}")
        if end >= at:
            at, before = end, name
    return problems
