"""A directory that means to be the release against the release's own figures: totals, file sizes, hashes, decoded values."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from evrun.expert_worker.wire.checkpoint.shards import INDEX_FILE, read_shard
from evrun.expert_worker.wire.checkpoint.survey import Survey
from evrun.kernels.formats import E2M1_VALUES, E4M3_VALUES, e8m0_to_float32
from evrun.launch.inspection import groups, release
from evrun.launch.inspection.report import Outcome, Report

OTHER = "this is another revision, or the file was changed: fetch it again"


def check_release(report: Report, found: Survey) -> None:
    """Adds one check when the directory does not mean to be the release, else one a figure."""
    assert found.config is not None
    index = _sha256(found.directory / INDEX_FILE)
    if not release.claims_to_be(found.config, len(found.weight_map), found.total_size, index):
        size = f"{len(found.weight_map)} tensors in {len(found.named)} shards"
        report.add("release", release.NAME, "pass", f"another checkpoint ({size}): the release's figures do not apply")
        return
    _check_totals(report, found)
    for file, expected in release.FILE_SHA256.items():
        digest = index if file == INDEX_FILE else _sha256(found.directory / file)
        _compare(report, file, expected, digest, f"{found.directory / file}")
    _check_file_bytes(report, found)
    for name, expected in release.TENSOR_SHA256.items():
        data = _bytes_of(found, name)
        digest = hashlib.sha256(data).hexdigest() if data is not None else ""
        _compare(report, name, expected, digest, f"{found.directory / found.weight_map.get(name, INDEX_FILE)}: {name}")
    for sample in release.SAMPLES:
        _check_sample(report, found, sample)


def _check_totals(report: Report, found: Survey) -> None:
    assert found.catalog is not None
    assert found.config is not None
    have = groups.found(found.catalog, found.config)
    lines = []
    for group, size in release.GROUP_SIZES.items():
        there = have.get(group, groups.Size(0, 0))
        if there != size:
            lines.append(f"{group}: expected {size.tensors} tensors of {size.bytes} bytes, found {there.tensors} of {there.bytes}")
    for what, expected, number in (
        ("tensors in the index", release.TENSORS, len(found.weight_map)),
        ("shards in the index", release.SHARDS, len(found.named)),
        ("metadata.total_size", release.TOTAL_SIZE, found.total_size),
    ):
        if number != expected:
            lines.append(f"{INDEX_FILE}: {what}: expected {expected}, found {number}; {OTHER}")
    whole = len(found.shards) == len(found.named)
    outcome: Outcome = "pass" if not lines else "fail" if whole else "undecided"
    words = "equal to the byte" if not lines else f"{len(lines)} differ"
    report.add("release totals", f"{release.TOTAL_SIZE} bytes", outcome, words, lines)


def _check_file_bytes(report: Report, found: Survey) -> None:
    lines = []
    sizes = {shard.path.name: shard.identity[2] for shard in found.shards}
    for number, expected in release.FILE_BYTES.items():
        file = f"model-{number:05d}-of-{release.SHARDS:05d}.safetensors"
        if file in sizes and sizes[file] != expected:
            lines.append(f"{found.directory / file}: expected {expected} bytes, found {sizes[file]}; {OTHER}")
    whole = len(sizes) == len(found.named)
    total = sum(sizes.values())
    if whole and total != release.SHARD_FILES_BYTES:
        lines.append(f"{found.directory}: expected {release.SHARD_FILES_BYTES} bytes in all shard files, found {total}")
    outcome: Outcome = "fail" if lines else "pass" if whole else "undecided"
    report.add("release files", f"{release.SHARD_FILES_BYTES} bytes", outcome, f"{len(sizes)} shard files, {total} bytes", lines)


def _compare(report: Report, subject: str, expected: str, found: str, where: str) -> None:
    if not found:
        report.add("release hash", subject, "undecided", "not there yet")
    elif found == expected:
        report.add("release hash", subject, "pass", f"sha256 {found[:16]}...")
    else:
        report.add("release hash", subject, "fail", "another hash", [f"{where}: expected sha256 {expected}, found {found}; {OTHER}"])


def _check_sample(report: Report, found: Survey, sample: release.Sample) -> None:
    """Row 0 of a weight, decoded."""
    subject = f"{sample.weight}, row 0"
    codes, scales = _bytes_of(found, sample.weight, len(sample.codes)), _bytes_of(found, sample.scale, 1)
    if codes is None or scales is None:
        report.add("release values", subject, "undecided", "not there yet")
        return
    values = decode(codes, scales[0], packed=len(sample.values) == 2 * len(codes))
    if codes == sample.codes and scales[0] == sample.scale_byte and np.array_equal(values, np.array(sample.values, np.float32)):
        report.add("release values", subject, "pass", f"{', '.join(f'{v:g}' for v in values[:4])}, ...")
        return
    expected, scale = sample.codes.hex(" "), f"scale byte 0x{sample.scale_byte:02x}"
    line = f"{subject}: expected bytes {expected}, {scale}; found {codes.hex(' ')}, 0x{scales[0]:02x}; {OTHER}"
    report.add("release values", subject, "fail", "other values", [line])


def decode(codes: bytes, scale: int, packed: bool) -> np.ndarray:
    """Values under one scale byte: E2M1 pairs, low nibble first, when `packed`, else E4M3 (spec 2.4)."""
    raw = np.frombuffer(codes, np.uint8)
    values = np.stack([E2M1_VALUES[raw & 15], E2M1_VALUES[raw >> 4]], axis=1).reshape(-1) if packed else E4M3_VALUES[raw]
    result: np.ndarray = values * e8m0_to_float32(np.array([scale], np.uint8))
    return result


def _bytes_of(found: Survey, name: str, count: int | None = None) -> bytes | None:
    """A tensor's first `count` bytes (all when None), or None while its shard is not whole."""
    file = found.weight_map.get(name)
    shard = read_shard(found.directory / file)[0] if file else None
    if shard is None or shard.header.problems or name not in shard.header.names:
        return None
    i = shard.header.names.index(name)
    start, end = int(shard.header.starts[i]), int(shard.header.ends[i])
    with open(shard.path, "rb") as data:
        return os.pread(data.fileno(), end - start if count is None else min(count, end - start), shard.header.data_start + start)


def _sha256(path: Path) -> str:
    """Of a small file; empty when it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
