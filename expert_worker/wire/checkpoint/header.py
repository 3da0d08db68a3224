"""The header of one safetensors file: an 8-byte length, JSON, then the tensors without gaps.

`parse` is pure and total: whatever the bytes, it returns entries and problems, never raises. Offsets are relative to
`data_start`, as in the file.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from evrun.expert_worker.wire.checkpoint.dtypes import ITEM_BYTES

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_RANK = 8


class Entry(NamedTuple):
    """One tensor of a header. `start` and `end` are bytes after `data_start`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a header says, and what is wrong with it: one text per problem, without the file's name."""

    data_start: int = 0
    entries: dict[str, Entry] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def shown(name: str) -> str:
    """A name out of a file as it may stand in a line for people: no control characters, bounded length."""
    return name if name.isprintable() and len(name) <= 200 else ascii(name)[:200]


def header_bytes(prefix: bytes, file_bytes: int) -> tuple[int, str]:
    """(length of the JSON part, "") from the first bytes of a file, or (0, what is wrong)."""
    if file_bytes < LENGTH_BYTES or len(prefix) < LENGTH_BYTES:
        return 0, f"expected a safetensors file, found {file_bytes} bytes (a header length alone takes {LENGTH_BYTES}); copy the file again"
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
        return Header(problems=[f"the header is not JSON ({type(error).__name__}: {str(error)[:80]}); copy the file again"])
    if not isinstance(raw, dict):
        return Header(problems=[f"expected a JSON object as header, found {type(raw).__name__}; copy the file again"])
    data_start = LENGTH_BYTES + len(text)
    room = file_bytes - data_start
    raw.pop("__metadata__", None)
    entries: dict[str, Entry] = {}
    problems: list[str] = []
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    past_end: list[str] = []
    last = 0
    for name, item in raw.items():
        try:
            dtype, shape, (start, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
            size = sizes.get((dtype, shape), -1)
        except (TypeError, KeyError, ValueError):
            problems.append(f"{shown(name)}: expected dtype, shape and two data_offsets, found {item!r:.120}")
            continue
        if size < 0:
            size, wrong = _size(dtype, shape)
            if wrong:
                problems.append(f"{shown(name)}: {wrong}")
                continue
            sizes[dtype, shape] = size
        if type(start) is not int or type(end) is not int or start < 0 or end < start:
            problems.append(f"{shown(name)}: expected data_offsets 0 <= start <= end, found [{start!r:.40}, {end!r:.40}]")
            continue
        if end - start != size:
            problems.append(f"{shown(name)}: {dtype} {list(shape)} takes {size} bytes, data_offsets [{start}, {end}] hold {end - start}")
            continue
        if end > room:
            past_end.append(name)
            last = max(last, end)
            continue
        entries[name] = Entry(dtype, shape, start, end)
    if past_end:
        problems.append(
            f"truncated: expected {data_start + last} bytes, found {file_bytes}; {len(past_end)} tensors reach beyond the end, "
            f"first {shown(past_end[0])}; copy the file again"
        )
    warnings: list[str] = []
    if not problems:
        problems, used = _gaps(entries)
        if not problems and used < room:
            warnings.append(f"{room - used} bytes after the last tensor, ignored (file {file_bytes} bytes, {data_start + used} used)")
    return Header(data_start, entries, problems, warnings)


def _size(dtype: object, shape: tuple[object, ...]) -> tuple[int, str]:
    """(bytes, "") of a tensor, or (0, what is wrong with it)."""
    item = ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
    if item is None:
        return 0, f"unknown dtype {dtype!r:.40}; known: {', '.join(ITEM_BYTES)}"
    dims = [d for d in shape[:MAX_RANK] if type(d) is int and 0 <= d < 1 << 62]
    if len(dims) != len(shape):
        return 0, f"expected a shape of at most {MAX_RANK} non-negative integers, found {list(shape)!r:.80}"
    return item * math.prod(dims), ""


def _gaps(entries: dict[str, Entry]) -> tuple[list[str], int]:
    """(problems, end of the last tensor): extents must follow each other without overlap or hole."""
    problems = []
    at, before = 0, "the header"
    for start, end, name in sorted((e.start, e.end, name) for name, e in entries.items()):
        if start != at:
            wrong = "overlap" if start < at else f"leave a hole of {start - at} bytes after"
            problems.append(f"{shown(name)}: data_offsets [{start}, {end}] {wrong} {shown(before)}, which ends at {at}")
        if end >= at:
            at, before = end, name
    return problems, at
