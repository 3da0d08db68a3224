"""SHA-256 of whole shard files, in the form that `sha256sum` writes and checks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from evrun.expert_worker.wire.errors import UsageError

_LINE = re.compile(r"([0-9a-f]{64}) [ *](\S.*)")
_BLOB = re.compile(r"[0-9a-f]{64}")


def read_digests(path: Path) -> dict[str, str]:
    """File name -> digest. Folders before a name are left out. Raises UsageError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--digests {path}: expected a readable file that --write-digests or sha256sum wrote, found: {error}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise UsageError(f"--digests {path}: line {number}: expected `<sha256>  <file>`, found {line[:80]!r}")
        found[os.path.basename(match[2])] = match[1]
    return found


def write_digests(path: Path, digests: Mapping[str, str]) -> None:
    """`sha256sum -c` in the checkpoint's folder checks it. Raises OSError."""
    path.write_text("".join(f"{digest}  {file}\n" for file, digest in sorted(digests.items())), encoding="utf-8")


def digest_in_name(resolved: str) -> str:
    """What a Hugging Face cache says of a file: its blob is named by its SHA-256. Empty for any other file."""
    blob = Path(resolved)
    return blob.name if blob.parent.name == "blobs" and _BLOB.fullmatch(blob.name) else ""
