"""Files of a checkpoint directory: found, identified, read up to their header. All I/O of opening is here and in `reader`."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evrun.expert_worker.wire.checkpoint.header import LENGTH_BYTES, Header, header_bytes, parse, shown

INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"

Identity = tuple[int, int, int, int]
"""(device, inode, size in bytes, mtime in ns) of a file."""


def identity_of(status: os.stat_result) -> Identity:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class Shard:
    """One opened and closed shard: what it is, and what its header says."""

    path: Path
    """As the directory names it; may be a symlink."""
    resolved: str
    identity: Identity
    header: Header

    def without_header(self) -> Shard:
        """The same without the header's thousands of objects."""
        return dataclasses.replace(self, header=Header())


def file_problem(path: Path) -> str:
    """Why a file that must be there cannot be used, or "". Links are followed; the line then names the target."""
    try:
        status = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            return f"expected a file, found a link whose target {path.readlink()} is missing"
        return "missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    target = f" (link to {path.readlink()})" if path.is_symlink() else ""
    if not stat.S_ISREG(status.st_mode):
        return f"expected a file, found {'a directory' if stat.S_ISDIR(status.st_mode) else 'something else'}{target}"
    if status.st_size == 0:
        return f"expected a file with content, found an empty one{target}"
    if not os.access(path, os.R_OK, effective_ids=True):
        return f"cannot be read (Permission denied){target}"
    return ""


def read_shard(path: Path) -> tuple[Shard | None, str]:
    """The shard's header and identity, or None and why not. Identity and header come from the same open file."""
    wrong = file_problem(path)
    if wrong:
        return None, wrong
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    try:
        status = os.fstat(fd)
        length, wrong = header_bytes(os.pread(fd, LENGTH_BYTES, 0), status.st_size)
        if wrong:
            return None, wrong
        text = os.pread(fd, length, LENGTH_BYTES)
        if len(text) != length:
            return None, f"expected a header of {length} bytes, read {len(text)}; was the file cut while it was read?"
        return Shard(path, os.path.realpath(path), identity_of(status), parse(text, status.st_size)), ""
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    finally:
        os.close(fd)


def read_index(path: Path) -> tuple[dict[str, str], int | None, list[str]]:
    """(tensor name -> shard file name, metadata.total_size, problems) of an index file."""
    wrong = file_problem(path)
    if wrong:
        return {}, None, [f"{path}: {wrong}; copy the file again"]
    try:
        raw = json.loads(path.read_bytes())
        weight_map = raw["weight_map"]
        if not isinstance(weight_map, dict) or not all(isinstance(s, str) for s in weight_map.values()):
            raise TypeError("weight_map is not an object of strings")
    except OSError as error:
        return {}, None, [f"{path}: cannot be read ({error.strerror})"]
    except KeyError:
        return {}, None, [f"{path}: expected the key weight_map, found none; copy the file again"]
    except (ValueError, TypeError, RecursionError) as error:
        return {}, None, [f"{path}: not an index ({type(error).__name__}: {str(error)[:80]}); copy the file again"]
    problems = [
        f"{path}: expected plain file names as shards, found {shown(name)!r}"
        for name in sorted({s for s in weight_map.values() if s in ("", ".", "..") or "/" in s or not s.isprintable()})
    ]
    if not weight_map:
        problems.append(f"{path}: expected tensors in weight_map, found none; copy the file again")
    metadata = raw.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total if type(total) is int else None, problems


def identity_problem(shard: Shard, known: Mapping[str, Identity]) -> str:
    """Why a shard is not the file that the run was started with, or ""."""
    expected = known.get(shard.resolved)
    if expected is None:
        found = f"found {shard.resolved}; put the old files back or start the run again"
        return f"expected one of the {len(known)} files this run was started with ({min(known, default='none')}, ...), {found}"
    if tuple(expected) != shard.identity:
        return changed(expected, shard.identity)
    return ""


def changed(expected: Identity, found: Identity) -> str:
    both = f"expected {_shown(expected)}, found {_shown(found)}"
    return f"not the file this run was started with: {both}; put it back or start the run again"


def _shown(identity: Identity) -> str:
    device, inode, size, mtime = identity
    return f"device {device} inode {inode} size {size} mtime {mtime} ns"


def extra_files(directory: Path, named: set[str]) -> list[str]:
    """Entries of the directory that look like shards and that the index does not name. Raises OSError."""
    return sorted(e for e in os.listdir(directory) if e.endswith(".safetensors") and e not in named)
