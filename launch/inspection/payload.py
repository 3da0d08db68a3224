"""`--deep`: every byte of every shard, read once, counted and hashed, some shards side by side.

Files are read and not mapped: a file that is cut or a disk that fails then is an error with a place, not a signal.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from evrun.expert_worker.wire.checkpoint.dtypes import ITEM_BYTES
from evrun.expert_worker.wire.checkpoint.header import shown
from evrun.expert_worker.wire.checkpoint.schema import is_engram_table
from evrun.expert_worker.wire.checkpoint.shards import Shard, read_shard
from evrun.launch.inspection.digests import digest_in_name
from evrun.launch.inspection.report import Outcome, Report
from evrun.launch.inspection.scan import BAD, KINDS, PAGE_BYTES, ROW_DTYPES, U8, Findings, scan

PIECE_BYTES = 1 << 20
"""Stays in the caches between reading, hashing and counting."""
AHEAD_BYTES = 16 << 20
MOST_LINES = 8
"""Of one shard and kind; the rest is counted."""

Progress = Callable[[int], None]
"""(bytes read since the last call), from several threads."""


@dataclass
class ShardPayload:
    """What one shard holds."""

    file: str
    bytes: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sha256: str = ""


def inspect_payload(
    report: Report, shards: Sequence[Shard], digests: Mapping[str, str] | None, hash_all: bool, progress: Progress, threads: int
) -> dict[str, str]:
    """Adds a check per shard to the report, and its totals. Returns the digests by file, where they were computed.

    shards    of a survey; those with unsound headers fail there and are left out here
    digests   file -> SHA-256 that is expected, or None
    hash_all  compute digests although there is nothing to compare them with
    """
    started = time.monotonic()
    stop = threading.Event()

    def one(shard: Shard) -> ShardPayload:
        expected = digests.get(shard.path.name) if digests is not None else None
        return read_payload(shard.path, hash_all or digests is not None, expected, progress, stop)

    largest_first = sorted(shards, key=lambda s: -s.identity[2])
    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="payload") as pool:
        try:
            found = {p.file: p for p in pool.map(one, largest_first)}
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    seconds = time.monotonic() - started
    for shard in shards:
        payload = found[shard.path.name]
        if digests is not None and payload.file not in digests:
            payload.notes.append(f"{shard.path}: the digests do not name it")
        _add(report, payload)
    for file in sorted(set(digests or ()) - set(found)):
        where = f"{report.directory}/{file}"
        report.add("digest", file, "fail", "no such shard", [f"{where}: the digests name it, the index has no sound shard of this name"])
    total = sum(p.bytes for p in found.values())
    counts = {kind: sum(p.counts.get(kind, 0) for p in found.values()) for kind in KINDS}
    report.payload = {
        "bytes": total, "seconds": seconds, "gb_per_s": total / max(seconds, 1e-9) / 1e9, "threads": threads, "counts": counts,
    }  # fmt: skip
    return {p.file: p.sha256 for p in found.values() if p.sha256}


def _add(report: Report, payload: ShardPayload) -> None:
    counted = [f"{count} x {kind}" for kind, count in payload.counts.items()]
    outcome: Outcome = "fail" if payload.problems else "pass"
    words = ", ".join(counted) or ("clean" if not payload.problems else "not as it should be")
    report.add("payload", payload.file, outcome, words, payload.problems, payload.notes)


def read_payload(path: Path, hashed: bool, expected: str | None, progress: Progress, stop: threading.Event) -> ShardPayload:
    """One shard from its first byte to its last. `expected`: its digest, from a file; a Hugging Face blob names its own."""
    result = ShardPayload(path.name)
    shard, wrong = read_shard(path)
    if shard is None or shard.header.problems:
        result.problems.append(f"{path}: {wrong or (shard and shard.header.problems[0])}; its header was read before: is it being written?")
        return result
    named = digest_in_name(shard.resolved)
    digest: Any = hashlib.sha256() if hashed or named else None
    try:
        with open(path, "rb", buffering=0) as file:
            reader = _Reader(file.fileno(), shard.identity[2], digest, progress, stop)
            reader.pass_over(shard.header.data_start)
            for i in np.argsort(shard.header.starts, kind="stable").tolist():
                _read_tensor(reader, shard, i, result)
            reader.pass_over(shard.identity[2])
            result.bytes = reader.at
    except OSError as error:
        result.problems.append(f"{path}: cannot be read at byte {reader.at} ({error.strerror}); is the disk sound? Copy the file again")
        return result
    if digest is not None:
        result.sha256 = digest.hexdigest()
        for source, wanted in (("the digests say", expected), ("its blob is named", named)):
            if wanted and wanted != result.sha256:
                result.problems.append(f"{path}: sha256 {result.sha256}, {source} {wanted}: the file is damaged; copy it again")
    return result


class _Reader:
    """A file in order, in pieces; every byte is hashed."""

    def __init__(self, fd: int, size: int, digest: Any, progress: Progress, stop: threading.Event) -> None:
        self._fd, self._size, self._digest, self._progress, self._stop = fd, size, digest, progress, stop
        self._buffer: U8 = np.empty(PIECE_BYTES, np.uint8)
        self._asked = 0
        self.at = 0

    def take(self, count: int) -> U8:
        """The next bytes; valid until the next call. Raises OSError."""
        if self._stop.is_set():
            raise InterruptedError(4, "stopped")
        if count > len(self._buffer):
            self._buffer = np.empty(count, np.uint8)
        if self.at + count > self._asked:
            os.posix_fadvise(self._fd, self.at, count + AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
            self._asked = self.at + count + AHEAD_BYTES // 2
        piece = self._buffer[:count]
        got = 0
        while got < count:
            more = os.preadv(self._fd, [piece[got:].data], self.at + got)
            if more == 0:
                raise OSError(5, f"the file ends at byte {self.at + got} although it had {self._size} bytes: was it cut?")
            got += more
        self.at += count
        if self._digest is not None:
            self._digest.update(piece)
        self._progress(count)
        return piece

    def pass_over(self, until: int) -> None:
        """Bytes that no tensor holds: only their digest counts."""
        while self._digest is not None and self.at < until:
            self.take(min(PIECE_BYTES, until - self.at))
        self.at = max(self.at, until)


def _read_tensor(reader: _Reader, shard: Shard, i: int, result: ShardPayload) -> None:
    header = shard.header
    dtype, shape = header.kinds[header.kind_of[i]]
    size = int(header.ends[i] - header.starts[i])
    reader.pass_over(header.data_start + int(header.starts[i]))
    has_rows = len(shape) > 1 and size > 0
    row = size // shape[0] if has_rows else ITEM_BYTES[dtype]
    step = max(1, PIECE_BYTES // row) * row
    found = Findings()
    for start in range(0, size, step):
        scan(reader.take(min(step, size - start)), dtype, start, row if has_rows else 0, found)
    if found.counts:
        _judge(header.names[i], dtype, shape, row, size, found, shard.path, result)


def _judge(name: str, dtype: str, shape: tuple[int, ...], row: int, size: int, found: Findings, path: Path, result: ShardPayload) -> None:
    """Counts into lines: what no kernel can use is a problem, and so is a hole; a few zeros are a note."""
    for kind, count in found.counts.items():
        result.counts[kind] = result.counts.get(kind, 0) + count
        if kind == "E8M0 byte 0":
            continue  # a scale of 2^-127: legal, and counted
        if kind == "all-zero row":
            hole = found.zero_run_bytes >= min(PAGE_BYTES, size) and dtype in ROW_DTYPES and not is_engram_table(name)
            where = f"{count} all-zero rows, first row {found.first[kind]}, longest run {found.zero_run_bytes} bytes"
            cause = ": bytes that never arrived? Copy the file again" if hole else ""
        else:
            columns = shape[-1] if len(shape) > 1 else 1
            place, column = divmod(found.first[kind], columns)
            at = f"row {place}, column {column}" if len(shape) > 1 else f"element {place}"
            hole = kind in BAD
            where, cause = f"{count} x {kind}, first in {at}", "; the file is damaged or was written wrongly: copy it again"
        lines = result.problems if hole else result.notes
        if sum(kind in line for line in lines) < MOST_LINES:
            lines.append(f"{path}: {shown(name)}: {where}{cause}")
