"""Where a checkpoint lies and what is still on its way: Hugging Face caches, and the part files of common downloaders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evrun.expert_worker.wire.errors import UsageError

PART_SUFFIXES = (".incomplete", ".part", ".partial", ".aria2", ".crdownload", ".download", ".!qB", ".tmp")
"""What downloaders put behind a name until the file is whole. Hugging Face: `.incomplete`."""
_HUB_DOWNLOADS = Path(".cache/huggingface/download")
"""Where `hf download --local-dir` keeps what is not whole."""


def snapshot_of(directory: Path) -> Path:
    """The folder that holds the files: itself, or for `models--OWNER--NAME` of a Hugging Face cache the snapshot in use.

    Raises UsageError when there are several snapshots and `refs/main` names none of them.
    """
    snapshots = directory / "snapshots"
    if not snapshots.is_dir() or not (directory / "blobs").is_dir():
        return directory
    there = sorted(entry for entry in snapshots.iterdir() if entry.is_dir())
    try:
        named = snapshots / (directory / "refs/main").read_text().strip()
    except OSError:
        named = snapshots / "main"
    if named in there:
        return named
    if len(there) != 1:
        names = ", ".join(entry.name for entry in there) or "none"
        raise UsageError(f"{directory}: expected one snapshot, or refs/main that names one, found {names}; give the folder of one of them")
    return there[0]


@dataclass(frozen=True)
class Downloads:
    """Files that are not whole yet."""

    parts: tuple[Path, ...]

    @classmethod
    def look(cls, directory: Path) -> Downloads:
        """In the folder, in its own download cache, and in the blobs that a snapshot's links point to."""
        blobs = directory.parent.parent / "blobs" if directory.parent.name == "snapshots" else None
        folders = [directory, directory / _HUB_DOWNLOADS, *([blobs] if blobs else [])]
        return cls(tuple(path for folder in folders for path in _parts(folder)))

    def of(self, path: Path) -> Path | None:
        """The part file of exactly this file: same name or link target, with a suffix behind it."""
        names = {path.name}
        if path.is_symlink():
            names.add(os.path.basename(os.readlink(path)))
        return next((part for part in self.parts if part.name.startswith(tuple(names)) and part.name not in names), None)

    def describe(self) -> str:
        """`3 part files, 1.20 GiB so far, e.g. PATH`, or empty."""
        if not self.parts:
            return ""
        size = sum(_size(part) for part in self.parts)
        return f"{len(self.parts)} part file(s), {size / 2**30:.2f} GiB so far, e.g. {self.parts[0]}"


def _parts(folder: Path) -> Iterator[Path]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        if name.endswith(PART_SUFFIXES) and (folder / name).is_file():
            yield folder / name


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
