"""`evrun inspect`: one outcome a check, exit code 3 when one fails, damage named by file, tensor and place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import checkpoint_files as files
import numpy as np
import pytest

from evrun.expert_worker.wire.checkpoint.schema import text_schema
from evrun.launch import cli
from evrun.launch.export import documents, geometry, tokenizer
from evrun.launch.export.checkpoint import complete
from evrun.launch.export.writer import tensor_bytes
from evrun.launch.inspection import groups, release, scan
from evrun.launch.inspection.release_checks import decode

GOLDEN = Path(__file__).parents[1] / "golden"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound") / "checkpoint"
    files.write_mini(directory)
    return directory


@pytest.fixture
def ckpt(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "checkpoint"))


class Inspect:
    """`evrun inspect --json` in this process."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, directory: Path, *options: str) -> dict[str, Any]:
        code = cli.main(["inspect", str(directory), "--json", *options])
        out, self.err = self._capfd.readouterr()
        report: dict[str, Any] = json.loads(out)
        assert (code, report["verdict"]) in ((0, "pass"), (0, "undecided"), (3, "fail")), (code, report["verdict"])
        if code:
            (line,) = self.err.splitlines()
            assert line.startswith(f"evrun: checkpoint {report['directory']}: ")
        return report

    def failing(self, directory: Path, *options: str) -> tuple[list[str], list[str]]:
        """(names of the checks that fail, their lines)."""
        failed = [c for c in self(directory, *options)["checks"] if c["outcome"] == "fail"]
        return [c["name"] for c in failed], [line for c in failed for line in c["problems"]]


@pytest.fixture
def inspect(capfd: pytest.CaptureFixture[str]) -> Inspect:
    return Inspect(capfd)


def outcomes(report: dict[str, Any], name: str) -> dict[str, str]:
    return {c["subject"]: c["outcome"] for c in report["checks"] if c["name"] == name}


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


@pytest.mark.parametrize("name", ["minimal", "full", "long"])
def test_golden_checkpoints_pass(name: str, inspect: Inspect) -> None:
    report = inspect(GOLDEN / name / "checkpoint", "--deep", "--require-complete")
    assert report["verdict"] == "pass"
    assert set(report["payload"]["counts"].values()) == {0}
    for group in report["groups"]:
        assert group["bytes"] >= group["expected_bytes"]


@pytest.mark.parametrize("options", [{}, {"scatter": 3}, {"layout": "both"}, {"layout": "flat"}])
def test_generated_checkpoints_pass(tmp_path: Path, options: dict[str, Any], inspect: Inspect) -> None:
    files.write_mini(tmp_path / "c", **options)
    assert inspect(tmp_path / "c", "--deep", "--require-complete")["verdict"] == "pass"


def test_the_table_for_people(sound: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(sound), "--deep"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "0 fail, 0 undecided" in out
    assert "routed experts" in out


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        ([], 2, "Missing argument 'DIR'"),
        (["/no/such/folder"], 3, "expected a checkpoint directory, found nothing"),
        (["{sound}", "--digests", "/no/such/file"], 2, "--digests /no/such/file: expected a readable file"),
        (["{sound}", "--write-digests", "/no/such/folder/f"], 2, "expected a file in a folder that exists"),
        (["{sound}", "--threads", "0"], 2, "--threads"),
        (["{sound}", "--shallow"], 2, "No such option"),
    ],
)
def test_bad_arguments(sound: Path, arguments: list[str], exit_code: int, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", *(a.format(sound=sound) for a in arguments)]) == exit_code
    (line,) = capfd.readouterr().err.splitlines()
    assert words in line


# What is not there yet


def test_a_missing_shard_is_undecided_until_everything_is_required(ckpt: Path, inspect: Inspect) -> None:
    gone = shards(ckpt)[2]
    carried = len(files.read_header(gone)) - 1
    gone.unlink()
    report = inspect(ckpt, "--deep")
    assert report["verdict"] == "undecided"
    assert outcomes(report, "shard")[gone.name] == "undecided"
    assert set(outcomes(report, "experts").values()) | set(outcomes(report, "totals").values()) == {"undecided"}
    (check,) = [c for c in report["checks"] if c["subject"] == gone.name]
    assert f"{gone}: missing; the index places {carried} tensors here" in check["problems"][0]
    assert "nothing shows that it is on its way" in check["found"]
    names, _ = inspect.failing(ckpt, "--require-complete")
    assert names == ["shard", "experts", "totals"]


@pytest.mark.parametrize("suffix", [".part", ".incomplete", ".aria2"])
def test_a_part_file_says_where_the_shard_is(ckpt: Path, suffix: str, inspect: Inspect) -> None:
    coming = shards(ckpt)[1]
    part = coming.with_name(coming.name + suffix)
    coming.rename(part)
    report = inspect(ckpt)
    (check,) = [c for c in report["checks"] if c["subject"] == coming.name]
    assert (check["outcome"], f"coming: {part}" in check["found"]) == ("undecided", True)


def test_a_cut_shard_is_undecided_only_while_its_downloader_is_there(ckpt: Path, inspect: Inspect) -> None:
    shard = shards(ckpt)[1]
    os.truncate(shard, shard.stat().st_size - 100)
    names, lines = inspect.failing(ckpt)
    assert "shard" in names
    assert f"{shard}: truncated: expected" in lines[0]
    control = shard.with_name(shard.name + ".aria2")
    control.write_bytes(b"")
    assert inspect(ckpt)["verdict"] == "undecided"


def test_nothing_but_an_index_is_undecided(ckpt: Path, inspect: Inspect) -> None:
    for shard in shards(ckpt):
        shard.unlink()
    assert set(outcomes(inspect(ckpt, "--deep"), "shard").values()) == {"undecided"}


def hub_cache(ckpt: Path, root: Path) -> tuple[Path, Path]:
    """The checkpoint as a Hugging Face cache keeps it: (the model's folder, the snapshot)."""
    model = root / "models--deepseek-ai--some"
    blobs, snapshot = model / "blobs", model / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs/main").write_text("abc")
    for path in sorted(ckpt.iterdir()):
        name = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.move(path, blobs / name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / name)
    return model, snapshot


def test_hugging_face_cache(ckpt: Path, tmp_path: Path, inspect: Inspect) -> None:
    model, snapshot = hub_cache(ckpt, tmp_path)
    report = inspect(model, "--deep")
    assert (report["verdict"], report["directory"]) == ("pass", str(snapshot))
    (snapshot.parent / "other").mkdir()
    assert inspect(model)["directory"] == str(snapshot)
    # One blob still comes, one link points nowhere, one blob is empty.
    first, second, third = shards(snapshot)[:3]
    blob = first.resolve()
    blob.rename(blob.with_name(blob.name + ".incomplete"))
    second.resolve().unlink()
    third.resolve().write_bytes(b"")
    report = inspect(snapshot)
    found = outcomes(report, "shard")
    assert [found[p.name] for p in (first, second, third)] == ["undecided", "fail", "fail"]
    lines = [line for c in report["checks"] for line in c["problems"]]
    assert any(f"{second}: expected a file, found a link whose target" in line for line in lines)
    assert any(f"{third}: expected a file with content, found an empty one (link to" in line for line in lines)


def test_a_blob_that_is_not_what_its_name_says(ckpt: Path, tmp_path: Path, inspect: Inspect) -> None:
    _, snapshot = hub_cache(ckpt, tmp_path)
    shard = shards(snapshot)[1]
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    names, lines = inspect.failing(snapshot, "--deep")
    assert names == ["payload"]
    assert f"its blob is named {shard.resolve().name}: the file is damaged" in lines[0]


def test_several_snapshots_without_a_reference(ckpt: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, snapshot = hub_cache(ckpt, tmp_path)
    (snapshot.parent / "other").mkdir()
    (model / "refs/main").unlink()
    assert cli.main(["inspect", str(model)]) == 2
    assert "found abc, other; give the folder of one of them" in capfd.readouterr().err


# Damage that headers show (field reports, section A); every finding of the audit is tested in test_checkpoint_damage


def test_every_bad_shard_has_its_own_check(ckpt: Path, inspect: Inspect) -> None:
    a, b, c, d, e, f = shards(ckpt)
    a.write_bytes(b"")
    b.write_bytes(b"1234567")
    c.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    d.write_bytes((d.stat().st_size).to_bytes(8, "little") + d.read_bytes()[8:])
    os.truncate(e, e.stat().st_size - 1)
    f.unlink()
    f.mkdir()
    report = inspect(ckpt, "--deep")
    assert set(outcomes(report, "shard").values()) == {"fail"}
    assert outcomes(report, "payload") == {}
    lines = [line for c in report["checks"] if c["name"] == "shard" for line in c["problems"]]
    words = ["found an empty one", "found 7 bytes", "Git LFS pointer", "for the header alone", "truncated", "found a directory"]
    assert [w for w, line in zip(words, lines, strict=True) if w not in line] == []


def test_bytes_after_the_last_tensor_and_strangers_are_notes(ckpt: Path, inspect: Inspect) -> None:
    with shards(ckpt)[1].open("ab") as file:
        file.write(b"\xff" * 4096)
    (ckpt / "extra.safetensors").mkdir()
    (ckpt / "vision-00001.safetensors").write_bytes(b"another model")
    report = inspect(ckpt, "--deep")
    assert report["verdict"] == "pass"
    notes = [line for c in report["checks"] for line in c["notes"]]
    assert len(notes) == 3
    assert any("4096 bytes after the last tensor" in note for note in notes)
    assert sum("not named by the index" in note for note in notes) == 2


def _transpose(ckpt: Path) -> None:
    name = "layers.2.ffn.experts.0.w1.weight"
    files.rewrite_header(files.shard_of(ckpt, name), lambda h: h[name]["shape"].reverse())


def _relabel(ckpt: Path) -> None:
    name = "layers.1.ffn.experts.0.w3.scale"
    files.rewrite_header(files.shard_of(ckpt, name), lambda h: h[name].update(dtype="U8"))


def _unknown_dtype(ckpt: Path) -> None:
    name = "layers.1.ffn.experts.0.w3.scale"
    files.rewrite_header(files.shard_of(ckpt, name), lambda h: h[name].update(dtype="F4_E2M1"))


def _v4(ckpt: Path) -> None:
    files.rewrite_json(ckpt / "config.json", lambda c: c.update(model_type="deepseek_v4"))


def _lost_from_index(ckpt: Path) -> None:
    files.rewrite_json(ckpt / INDEX, lambda d: d["weight_map"].pop("head.weight") and None)


def _other_tokenizer(ckpt: Path) -> None:
    files.rewrite_json(ckpt / "config.json", lambda c: c["text_config"].update(engram_compressed_vocab_size=7))


@pytest.mark.parametrize(
    ("damage", "check", "words"),
    [
        (_transpose, "shard", "layers.2.ffn.experts.0.w1.weight: expected I8 [160, 48], found I8 [48, 160]"),
        (_relabel, "shard", "layers.1.ffn.experts.0.w3.scale: expected F8_E8M0 [160, 3], found U8 [160, 3]"),
        (_unknown_dtype, "shard", "layers.1.ffn.experts.0.w3.scale: unknown dtype 'F4_E2M1'"),
        (_v4, "config", "model_type: expected 'deepseek_v41', found 'deepseek_v4'"),
        (_lost_from_index, "index", "head.weight: missing: this model needs it"),
        (_other_tokenizer, "tokenizer", "expected 7 distinct normalised tokens"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_damage_is_named(ckpt: Path, damage: Any, check: str, words: str, inspect: Inspect) -> None:
    damage(ckpt)
    names, lines = inspect.failing(ckpt)
    assert names[0] == check
    assert any(words in line for line in lines), lines


# Damage that only the payload shows


@pytest.mark.parametrize(
    ("tensor", "byte", "value", "words"),
    [
        ("layers.1.ffn.experts.3.w2.scale", 11, 255, "layers.1.ffn.experts.3.w2.scale: 1 x E8M0 byte 255 (NaN), first in row 2, column 1"),
        ("layers.0.attn.wq_a.weight", 97, 0xFF, "layers.0.attn.wq_a.weight: 1 x NaN code of E4M3, first in row 1, column 1"),
        ("layers.1.engram.embed.weight", 33, 0x7F, "layers.1.engram.embed.weight: 1 x NaN code of E4M3, first in row 1, column 1"),
        ("norm.weight", 3, 0x7F, "norm.weight: 1 x infinity or NaN, first in element 1"),
    ],
)
def test_bad_values_are_named_with_their_place(ckpt: Path, tensor: str, byte: int, value: int, words: str, inspect: Inspect) -> None:
    if tensor == "norm.weight":
        files.poke(ckpt, tensor, byte - 1, 0x80)
    files.poke(ckpt, tensor, byte, value)
    assert inspect(ckpt)["verdict"] == "pass"
    names, lines = inspect.failing(ckpt, "--deep")
    assert names == ["payload"]
    assert [words in line for line in lines] == [True]


def test_zeros_are_counted_and_holes_fail(ckpt: Path, inspect: Inspect) -> None:
    name, row = "layers.1.ffn.experts.3.w1.weight", 48
    files.poke(ckpt, "layers.1.ffn.experts.3.w1.scale", 0, 0)
    for byte in range(5 * row, 7 * row):
        files.poke(ckpt, name, byte, 0)
    report = inspect(ckpt, "--deep")
    assert report["verdict"] == "pass"
    assert report["payload"]["counts"] | {"E8M0 byte 0": 1, "all-zero row": 2} == report["payload"]["counts"]
    (note,) = [line for c in report["checks"] for line in c["notes"]]
    assert f"{name}: 2 all-zero rows, first row 5, longest run 96 bytes" in note
    for byte in range(160 * row):
        files.poke(ckpt, name, byte, 0)
    _, lines = inspect.failing(ckpt, "--deep")
    assert f"{name}: 160 all-zero rows, first row 0, longest run 7680 bytes: bytes that never arrived?" in lines[0]


def test_digests_are_written_and_compared(ckpt: Path, tmp_path: Path, inspect: Inspect) -> None:
    sums = tmp_path / "sums"
    assert inspect(ckpt, "--write-digests", str(sums))["payload"]["bytes"] == sum(p.stat().st_size for p in shards(ckpt))
    wanted = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in shards(ckpt)}
    assert sums.read_text() == "".join(f"{digest}  {name}\n" for name, digest in sorted(wanted.items()))
    assert inspect(ckpt, "--digests", str(sums))["verdict"] == "pass"
    codes = "layers.1.ffn.experts.3.w1.weight"
    shard = files.shard_of(ckpt, codes)
    files.poke(ckpt, codes, 7, files.Raw(ckpt)[codes][7] ^ 1)
    _, lines = inspect.failing(ckpt, "--digests", str(sums))
    assert lines == [
        f"{shard}: sha256 {hashlib.sha256(shard.read_bytes()).hexdigest()}, the digests say {wanted[shard.name]}: "
        "the file is damaged; copy it again"
    ]
    sums.write_text(f"{'0' * 64}  elsewhere.safetensors\n")
    report = inspect(ckpt, "--digests", str(sums))
    assert outcomes(report, "digest") == {"elsewhere.safetensors": "fail"}
    assert sum("the digests do not name it" in note for c in report["checks"] for note in c["notes"]) == len(wanted)
    sums.write_text("nonsense\n")
    assert cli.main(["inspect", str(ckpt), "--digests", str(sums)]) == 2


@pytest.mark.parametrize("row_bytes", [1, 3, 8, 24, 100])
def test_zero_rows_and_their_runs(row_bytes: int) -> None:
    random = np.random.default_rng(row_bytes)
    zero = random.random(700) < 0.5
    rows = random.integers(1, 256, (700, row_bytes), dtype=np.uint8) * ~zero[:, None]
    rows[~zero, 0] *= random.integers(0, 2, int((~zero).sum()), dtype=np.uint8) if row_bytes > 1 else 1
    found = scan.Findings()
    for start in range(0, 700, 70):
        scan.scan(np.ascontiguousarray(rows[start : start + 70]).reshape(-1), "I8", start * row_bytes, row_bytes, found)
    runs = "".join("0" if z else "1" for z in zero).split("1")
    assert found.counts == {"all-zero row": int(zero.sum())}
    assert found.first == {"all-zero row": int(zero.argmax())}
    assert found.zero_run_bytes == max(map(len, runs)) * row_bytes


# The release


def test_the_release_s_schema_gives_its_published_totals() -> None:
    config = complete(geometry.values("release"))
    expected = groups.expected(config)
    extra = config.num_hidden_layers * config.n_routed_experts * 4  # ffn.gate.bias_vl, which the text backbone skips
    expected["router"] = groups.Size(expected["router"].tensors + config.num_hidden_layers, expected["router"].bytes + extra)
    assert {g: s for g, s in release.GROUP_SIZES.items() if g not in (groups.DRAFT, groups.VISION)} == expected
    assert sum(s.tensors for s in release.GROUP_SIZES.values()) == release.TENSORS
    assert sum(s.bytes for s in release.GROUP_SIZES.values()) == release.TOTAL_SIZE
    text = [s for g, s in release.GROUP_SIZES.items() if g not in (groups.DRAFT, groups.VISION)]
    assert groups.Size(sum(s.tensors for s in text), sum(s.bytes for s in text)) == release.TEXT_BACKBONE


def test_the_release_s_samples_decode_to_their_published_values() -> None:
    for sample in release.SAMPLES:
        packed = len(sample.values) == 2 * len(sample.codes)
        assert decode(sample.codes, sample.scale_byte, packed).tolist() == list(sample.values)


def test_another_geometry_does_not_claim_to_be_the_release(sound: Path, inspect: Inspect) -> None:
    (check,) = [c for c in inspect(sound)["checks"] if c["name"].startswith("release")]
    assert "the release's figures do not apply" in check["found"]


def write_hollow_release(directory: Path) -> None:
    """Config, index and all 48 headers of the release, over files with nothing in them; the unused groups in a few tensors."""
    config = complete(geometry.values("release"))
    by_shard: dict[int, list[tuple[str, tuple[str, tuple[int, ...]]]]] = {}
    for name, spec in text_schema(config).items():
        field = name.split(".")
        number = {"embed": 2, "head": 43, "norm": 43}.get(field[0]) or int(field[1]) + 3
        number = (47 if field[1] == "1" else 48) if "engram" in field else number
        by_shard.setdefault(number, []).append((name, spec))
    for layer in range(40):
        by_shard[layer + 3].append((f"layers.{layer}.ffn.gate.bias_vl", ("F32", (384,))))
    for number, group, prefix in ((1, groups.VISION, "vision"), (44, groups.DRAFT, "mtp")):
        size = release.GROUP_SIZES[group]
        by_shard[number] = [(f"{prefix}.{i}", ("U8", (1,))) for i in range(size.tensors - 1)]
        by_shard[number].append((f"{prefix}.rest", ("U8", (size.bytes - size.tensors + 1,))))
    by_shard[45], by_shard[46] = [by_shard[44].pop(0)], [by_shard[44].pop(0)]
    weight_map = {}
    for number, tensors in by_shard.items():
        file, at, header = f"model-{number:05d}-of-00048.safetensors", 0, {}
        for name, (dtype, shape) in tensors:
            end = at + tensor_bytes((dtype, shape))
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
            weight_map[name], at = file, end
        text = json.dumps(header).encode()
        (directory / file).write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(directory / file, 8 + len(text) + at)
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": release.TOTAL_SIZE}, "weight_map": weight_map}))
    (directory / "tokenizer.json").write_text(tokenizer.build(config.vocab_size).to_str())
    (directory / "config.json").write_text(documents.nested(config, 129264))


@pytest.mark.slow
def test_what_means_to_be_the_release_is_held_to_its_figures(tmp_path: Path, inspect: Inspect) -> None:
    write_hollow_release(tmp_path)
    report = inspect(tmp_path)
    assert outcomes(report, "release totals") == {"510286023000 bytes": "pass"}
    assert outcomes(report, "release files") == {"510296708312 bytes": "fail"}
    hashes = outcomes(report, "release hash")
    assert hashes.pop("tokenizer_config.json") == "undecided"
    assert set(hashes.values()) | set(outcomes(report, "release values").values()) == {"fail"}
    lines = [line for c in report["checks"] for line in c["problems"]]
    assert any("layers.0.attn.wkv.weight, row 0: expected bytes d8 71 f2 79 70 69 f0 e5" in line for line in lines)
    (tmp_path / "model-00042-of-00048.safetensors").unlink()
    report = inspect(tmp_path)
    assert outcomes(report, "release totals") == {"510286023000 bytes": "undecided"}
    assert outcomes(report, "release hash")["layers.39.ffn.gate.weight"] == "undecided"
