"""Everything the files of a checkpoint directory show without their payload, problem by problem. Never raises for bad files.

`reader` refuses a checkpoint that has any problem; `evrun inspect` shows where each one is.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from evrun.expert_worker.wire.checkpoint.audit import Catalog
from evrun.expert_worker.wire.checkpoint.config import ModelConfig, load_config
from evrun.expert_worker.wire.checkpoint.shards import (
    INDEX_FILE,
    TOKENIZER_FILE,
    Identity,
    Shard,
    extra_files,
    file_problem,
    identity_problem,
    read_index,
    read_shard,
)
from evrun.expert_worker.wire.errors import CheckpointError

Part = Literal["directory", "config", "tokenizer", "index", "shard", "tensors"]


class Problem(NamedTuple):
    """One finding. `tensors` are findings about what a sound header holds, `shard` those about the file itself."""

    part: Part
    file: str
    """Name in the directory; empty for the directory and the config."""
    text: str
    """The whole line: path, what, expected, found, what to do."""


@dataclass
class Survey:
    """What was found. Shards are in the order of their names, without their headers."""

    directory: Path
    config: ModelConfig | None = None
    weight_map: dict[str, str] = field(default_factory=dict)
    total_size: int | None = None
    """`metadata.total_size` of the index."""
    named: Counter[str] = field(default_factory=Counter)
    """Shard file -> tensors that the index places in it."""
    shards: list[Shard] = field(default_factory=list)
    catalog: Catalog | None = None
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What is odd and does no harm, one line each."""


def survey(directory: Path, identity: Mapping[str, Identity] | None = None) -> Survey:
    """Read config, index and every header of a directory.

    identity: resolved shard path -> (device, inode, size, mtime_ns); a shard that is another file is a problem.
    """
    found = Survey(directory)
    if wrong := _directory_problem(directory):
        found.problems.append(Problem("directory", "", wrong))
        return found
    try:
        found.config = load_config(directory)
    except CheckpointError as error:
        found.problems += [Problem("config", "", line) for line in error.problems]
    if wrong := file_problem(directory / TOKENIZER_FILE):
        found.problems.append(Problem("tokenizer", TOKENIZER_FILE, f"{directory / TOKENIZER_FILE}: {wrong}; copy the file again"))
    found.weight_map, found.total_size, wrong_index = read_index(directory / INDEX_FILE)
    found.problems += [Problem("index", INDEX_FILE, line) for line in wrong_index]
    if not wrong_index:
        _survey_shards(found, identity)
    return found


def _survey_shards(found: Survey, identity: Mapping[str, Identity] | None) -> None:
    directory = found.directory
    found.named = Counter(found.weight_map.values())
    catalog = found.catalog = Catalog(found.config) if found.config else None
    by_shard = catalog.sort(found.weight_map, str(directory / INDEX_FILE)) if catalog else {}
    for file in sorted(found.named):
        path = directory / file
        shard, cause = read_shard(path)
        if shard is None:
            line = f"{path}: {cause}; the index places {found.named[file]} tensors here, copy the file again"
            found.problems.append(Problem("shard", file, line))
            continue
        found.problems += [Problem("shard", file, f"{path}: {line}") for line in shard.header.problems]
        found.warnings += [f"{path}: {line}" for line in shard.header.warnings]
        if identity is not None and (cause := identity_problem(shard, identity)):
            found.problems.append(Problem("shard", file, f"{path}: {cause}"))
        if catalog and not shard.header.problems:
            catalog.take(str(path), len(found.shards), by_shard[file], shard.header)
            ignored = len(shard.header.names) - len(by_shard[file])
            if ignored > 0:
                found.warnings.append(f"{path}: {ignored} tensors that the index does not place here are ignored")
        found.shards.append(shard.without_header())
    if catalog is None:
        return
    for where, line in catalog.findings.by_place():
        file = os.path.basename(where)
        found.problems.append(Problem("index" if file == INDEX_FILE else "tensors", file, line))
    if found.total_size not in (None, catalog.tensor_bytes) and not any(p.part in ("shard", "tensors", "index") for p in found.problems):
        both = f"metadata.total_size says {found.total_size} bytes, the tensors take {catalog.tensor_bytes}"
        found.warnings.append(f"{directory / INDEX_FILE}: {both}")
    found.warnings += [f"{directory / name}: not named by the index, ignored" for name in extra_files(directory, set(found.named))]


def _directory_problem(directory: Path) -> str:
    try:
        os.listdir(directory)
    except FileNotFoundError:
        return f"{directory}: expected a checkpoint directory, found nothing; check the path"
    except NotADirectoryError:
        return f"{directory}: expected a checkpoint directory, found a file; give the directory that holds {INDEX_FILE}"
    except OSError as error:
        return f"{directory}: cannot be read ({error.strerror}); check its permissions"
    return ""
