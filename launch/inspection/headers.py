"""The checks that need no payload: config, index and headers against each other, and against the release's own figures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from evrun.coordinator.engram_map import distinct, token_map
from evrun.expert_worker.wire.checkpoint.audit import PARTS
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.shards import INDEX_FILE, TOKENIZER_FILE, Shard
from evrun.expert_worker.wire.checkpoint.survey import Part, Survey, survey
from evrun.expert_worker.wire.errors import CheckpointError
from evrun.launch.inspection import groups
from evrun.launch.inspection.place import Downloads
from evrun.launch.inspection.release_checks import check_release
from evrun.launch.inspection.report import Outcome, Report


def inspect_headers(directory: Path) -> tuple[Report, Survey]:
    """Every check that headers allow. `directory` is what `place.snapshot_of` gave."""
    found = survey(directory)
    report = Report(str(directory))
    downloads = Downloads.look(directory)
    if found.problems and found.problems[0].part == "directory":
        report.add("directory", str(directory), "fail", "cannot be used", [found.problems[0].text])
        return report, found
    report.add("directory", str(directory), "pass", downloads.describe() or "no part files", notes=_strangers(found, downloads))
    _check_config(report, found, downloads)
    _check_tokenizer(report, found, downloads)
    _check_index(report, found, downloads)
    for file in sorted(found.named):
        _check_shard(report, found, downloads, file)
    if found.catalog and found.config:
        _check_experts(report, found)
        _check_groups(report, found, found.config)
        check_release(report, found)
    return report, found


def _lines(found: Survey, part: Part, file: str | None = None) -> list[str]:
    return [p.text for p in found.problems if p.part == part and (file is None or p.file == file)]


def _strangers(found: Survey, downloads: Downloads) -> list[str]:
    """Files that look like shards and are none; what is on its way is told elsewhere."""
    parts = {str(p) for p in downloads.parts}
    return [w for w in found.warnings if "not named by the index" in w and w.split(":")[0] not in parts]


def _absent(downloads: Downloads, path: Path, problems: list[str]) -> Outcome:
    """Whether a file that is not usable fails its check, or may still come."""
    if not problems:
        return "pass"
    if downloads.of(path) is not None:
        return "undecided"
    return "undecided" if not path.is_symlink() and not path.exists() else "fail"


def _check_config(report: Report, found: Survey, downloads: Downloads) -> None:
    problems = _lines(found, "config")
    path = found.directory / "config.json"
    there = path.exists() or path.is_symlink() or (found.directory / "inference/config.json").exists()
    outcome: Outcome = "pass" if found.config else "undecided" if not there and downloads.parts else "fail"
    words = ""
    if c := found.config:
        size = f"{c.n_routed_experts} experts of {c.hidden_size} x {c.moe_intermediate_size}, {c.num_experts_per_tok} a token"
        words = f"{c.num_hidden_layers} layers x {size}; vocabulary {c.vocab_size}"
    report.add("config", "config.json", outcome, words or "no config that can be served", problems)


def _check_tokenizer(report: Report, found: Survey, downloads: Downloads) -> None:
    path = found.directory / TOKENIZER_FILE
    problems = _lines(found, "tokenizer")
    outcome = _absent(downloads, path, problems)
    words = "there" if not problems else "not usable"
    if not problems and found.config:
        size, problems = _tokenizer(path, found.config)
        words = f"{size} distinct normalised tokens" if size else "not this model's"
        outcome = "fail" if problems else "pass"
    report.add("tokenizer", TOKENIZER_FILE, outcome, words, problems)


def _tokenizer(path: Path, config: ModelConfig) -> tuple[int, list[str]]:
    """Whether the tokenizer belongs to the config: with another one every Engram row is wrong and the text still fluent."""
    try:
        size = distinct(token_map(path, config.vocab_size))
    except CheckpointError as error:
        return 0, error.problems
    if config.engram_layer_ids and size != config.engram_compressed_vocab_size:
        expected = f"expected {config.engram_compressed_vocab_size} distinct normalised tokens (engram_compressed_vocab_size)"
        return size, [f"{path}: {expected}, found {size}; it is not this config's tokenizer: copy both files again"]
    return size, []


def _check_index(report: Report, found: Survey, downloads: Downloads) -> None:
    path = found.directory / INDEX_FILE
    problems = _lines(found, "index")
    outcome: Outcome = _absent(downloads, path, problems) if not found.named else "fail" if problems else "pass"
    notes = [w for w in found.warnings if w.startswith(str(path))]
    report.add("index", INDEX_FILE, outcome, f"{len(found.weight_map)} tensors in {len(found.named)} shards", problems, notes)


def _check_shard(report: Report, found: Survey, downloads: Downloads, file: str) -> None:
    path = found.directory / file
    problems = _lines(found, "shard", file)
    own = _lines(found, "tensors", file)
    outcome: Outcome = "fail" if own else _absent(downloads, path, problems)
    notes = [w for w in found.warnings if w.startswith(f"{path}:") and "not named by" not in w]
    shard = next((s for s in found.shards if s.path == path), None)
    words = f"{found.named[file]} tensors"
    if outcome == "undecided":
        part = downloads.of(path)
        coming = f"coming: {part}" if part else f"{downloads.describe()}" if downloads.parts else "nothing shows that it is on its way"
        words = f"{words} not there yet; {coming}"
    elif shard:
        words += f", {_size(shard.identity[2])}{_link(shard)}"
    report.add("shard", file, outcome, words, problems + own, notes)


def _link(shard: Shard) -> str:
    return f" (link to {shard.path.readlink()})" if shard.path.is_symlink() else ""


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 30 else f"{count / 2**20:.2f} MiB"


def _check_experts(report: Report, found: Survey) -> None:
    """The routed experts of every layer, counted."""
    assert found.catalog is not None
    there = (found.catalog.expert_shards >= 0).sum(axis=(1, 2))
    wanted = int(np.prod(found.catalog.expert_shards.shape[1:]))
    short = np.flatnonzero(there != wanted).tolist()
    lines = [f"layer {layer}: expected {wanted} expert tensors, found {there[layer]}; fetch the shards that fail above" for layer in short]
    outcome = _depends(report, bool(short))
    words = f"{len(there) - len(short)} of {len(there)} layers have all {wanted // PARTS} experts"
    report.add("experts", f"{PARTS} tensors each", outcome, words, lines)


def _check_groups(report: Report, found: Survey, config: ModelConfig) -> None:
    """Tensors and bytes of every group against what this geometry needs."""
    assert found.catalog is not None
    have, need = groups.found(found.catalog, config), groups.expected(config)
    lines = []
    for group in groups.GROUPS:
        a, b = have.get(group, groups.Size(0, 0)), need.get(group, groups.Size(0, 0))
        if a == b == groups.Size(0, 0):
            continue
        report.groups.append(
            {"group": group, "tensors": a.tensors, "bytes": a.bytes, "expected_tensors": b.tensors, "expected_bytes": b.bytes}
        )
        if a.bytes < b.bytes or a.tensors < b.tensors:
            lines.append(f"{group}: expected {b.tensors} tensors of {b.bytes} bytes, found {a.tensors} of {a.bytes}")
    total = sum(size.bytes for size in have.values())
    words = f"{found.catalog.tensor_bytes} bytes of tensors in all" if not lines else f"{total} bytes of tensors so far"
    report.add("totals", "bytes by group", _depends(report, bool(lines)), words, lines)


def _depends(report: Report, lacking: bool) -> Outcome:
    """Outcome of a count over all shards: what lacks fails only when no shard can still bring it."""
    if not lacking:
        return "pass"
    shards: Iterable[str] = [c.outcome for c in report.checks if c.name == "shard"]
    return "undecided" if "undecided" in shards and "fail" not in shards else "fail"
