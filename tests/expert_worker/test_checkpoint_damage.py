"""Checkpoints that must not be served: every problem that a header shows is named, all of them at once, before anything starts."""

import os
import shutil
import tempfile
from pathlib import Path

import checkpoint_files as files
import pytest

from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.errors import CheckpointError

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """One checkpoint for the whole file: embedding, three layers, head, Engram."""
    directory = tmp_path_factory.mktemp("sound") / "checkpoint"
    files.write_mini(directory)
    return directory


@pytest.fixture
def ckpt(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "checkpoint"))


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


def problems(directory: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    error = caught.value
    assert error.exit_code == 3
    assert all("\n" not in line for line in error.problems)
    assert str(error).startswith(f"checkpoint {directory} refused, {len(error.problems)} problem(s):\n")
    return error.problems


def only(directory: Path) -> str:
    (line,) = problems(directory)
    return line


def test_the_undamaged_one_opens_without_a_warning(ckpt: Path) -> None:
    assert Checkpoint.open(ckpt).warnings == []


def test_missing_shard_is_named_with_the_tensors_it_carries(ckpt: Path) -> None:
    gone = shards(ckpt)[2]
    carried = len(files.read_header(gone)) - 1
    gone.unlink()
    assert only(ckpt) == f"{gone}: missing; the index places {carried} tensors here, copy the file again"


def test_every_bad_shard_is_listed(ckpt: Path) -> None:
    a, b, c, d, e, f = shards(ckpt)
    a.write_bytes(b"")
    b.write_bytes(b"1234567")
    c.write_bytes((1 << 40).to_bytes(8, "little") + c.read_bytes()[8:])
    d.write_bytes((d.stat().st_size).to_bytes(8, "little") + d.read_bytes()[8:])
    e.write_bytes(e.read_bytes()[:-100])
    f.write_bytes(f.read_bytes()[:8] + b"}" + f.read_bytes()[9:])
    found = problems(ckpt)
    assert [line.split(":")[0] for line in found] == [str(p) for p in (a, b, c, d, e, f)]
    words = ["found an empty one", "found 7 bytes", "not a safetensors file", "for the header alone", "truncated: expected", "not JSON"]
    assert all(word in line for word, line in zip(words, found, strict=True)), found
    assert f"expected {e.stat().st_size + 100} bytes, found {e.stat().st_size}" in found[4]


@pytest.mark.parametrize("size", [8, 9, 100])
def test_file_cut_inside_the_header(ckpt: Path, size: int) -> None:
    shard = shards(ckpt)[1]
    os.truncate(shard, size)
    assert f"found a file of {size}" in only(ckpt)


def test_bytes_after_the_last_tensor_warn_and_shift_nothing(ckpt: Path, sound: Path) -> None:
    shard = files.shard_of(ckpt, "norm.weight")
    with shard.open("ab") as file:
        file.write(b"\xff" * 4096)
    checkpoint = Checkpoint.open(ckpt)
    (warning,) = checkpoint.warnings
    assert str(shard) in warning
    assert "4096 bytes after the last tensor" in warning
    undamaged = Checkpoint.open(sound)
    for name, _ in checkpoint.dense_names:
        assert (checkpoint.tensor(name).data == undamaged.tensor(name).data).all()


def test_hugging_face_snapshot(ckpt: Path, tmp_path: Path, sound: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted(ckpt.iterdir())):
        shutil.move(path, blobs / f"{i:064x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{i:064x}")
    checkpoint = Checkpoint.open(snapshot)
    assert checkpoint.warnings == []
    assert all(Path(p).parent == blobs.resolve() for p in checkpoint.identity())
    assert (checkpoint.tensor("head.weight").data == Checkpoint.open(sound).tensor("head.weight").data).all()
    first, second = (snapshot / p.name for p in shards(sound)[:2])
    missing, empty = first.resolve(), second.resolve()
    missing.unlink()
    empty.write_bytes(b"")
    found = problems(snapshot)
    assert f"{first}: expected a file, found a link whose target ../../blobs/{missing.name} is missing" in found[0]
    assert f"{second}: expected a file with content, found an empty one (link to ../../blobs/{empty.name})" in found[1]


def test_directories_and_strangers_named_like_shards_are_ignored_and_mentioned(ckpt: Path) -> None:
    (ckpt / "extra.safetensors").mkdir()
    (ckpt / "model-00001-of-00002.safetensors").write_bytes(b"another model")
    (ckpt / "vision").mkdir()
    warnings = Checkpoint.open(ckpt).warnings
    assert [w.split(":")[0] for w in warnings] == [str(ckpt / "extra.safetensors"), str(ckpt / "model-00001-of-00002.safetensors")]


def test_a_directory_in_a_shards_place(ckpt: Path) -> None:
    shard = shards(ckpt)[0]
    shard.unlink()
    shard.mkdir()
    assert "found a directory" in only(ckpt)


def swap(header: dict, a: str, b: str) -> None:
    for kind in ("weight", "scale"):
        header[f"{a}.{kind}"], header[f"{b}.{kind}"] = header[f"{b}.{kind}"], header[f"{a}.{kind}"]


def test_w1_and_w2_exchanged(ckpt: Path) -> None:
    prefix = "layers.1.ffn.experts.3."
    shard = files.shard_of(ckpt, prefix + "w1.weight")
    files.rewrite_header(shard, lambda h: swap(h, prefix + "w1", prefix + "w2"))
    found = problems(ckpt)
    assert len(found) == 4
    assert any(f"{shard}: {prefix}w1.weight: expected I8 [160, 48], found I8 [96, 80]" in line for line in found)
    assert any(f"{prefix}w2.scale: expected F8_E8M0 [96, 5], found F8_E8M0 [160, 3]" in line for line in found)


def test_transposed_codes(ckpt: Path) -> None:
    name = "layers.2.ffn.experts.0.w1.weight"
    files.rewrite_header(files.shard_of(ckpt, name), lambda h: h[name]["shape"].reverse())
    assert f"{name}: expected I8 [160, 48], found I8 [48, 160]" in only(ckpt)


def test_halved_scale_rows(ckpt: Path) -> None:
    name = "layers.2.ffn.experts.0.w1.scale"

    def halve(header: dict) -> None:
        start, end = header[name]["data_offsets"]
        middle = (start + end) // 2
        header[name] = {"dtype": "F8_E8M0", "shape": [80, 3], "data_offsets": [start, middle]}
        header["rest"] = {"dtype": "F8_E8M0", "shape": [80, 3], "data_offsets": [middle, end]}

    files.rewrite_header(files.shard_of(ckpt, name), halve)
    assert f"{name}: expected F8_E8M0 [160, 3], found F8_E8M0 [80, 3]" in only(ckpt)


def test_scales_relabelled_as_numbers(ckpt: Path) -> None:
    name = "layers.0.attn.wq_a.scale"
    files.rewrite_header(files.shard_of(ckpt, name), lambda h: h[name].update(dtype="U8"))
    assert f"{name}: expected F8_E8M0 [4, 3], found U8 [4, 3]" in only(ckpt)


def test_one_mistake_in_many_experts_is_one_line(ckpt: Path) -> None:
    def relabel(header: dict) -> None:
        for name, entry in header.items():
            if ".experts." in name and name.endswith("w3.scale"):
                entry["dtype"] = "U8"

    files.rewrite_header(files.shard_of(ckpt, "layers.1.ffn.experts.0.w3.scale"), relabel)
    assert "layers.1.ffn.experts.0.w3.scale and 3 more: expected F8_E8M0" in only(ckpt)


def test_header_without_a_tensor_that_the_index_places_there(ckpt: Path) -> None:
    for name in ("norm.weight", "layers.0.ffn.experts.2.w2.scale"):
        files.rewrite_header(files.shard_of(ckpt, name), lambda h, n=name: h.update({"other": h.pop(n)}))
    found = problems(ckpt)
    assert len(found) == 2
    assert all("the header does not hold it" in line for line in found)


def test_tensors_that_the_index_lacks(ckpt: Path) -> None:
    def drop(document: dict) -> None:
        for name in ("head.weight", "layers.2.ffn.experts.1.w1.scale", "layers.1.engram.embed.weight"):
            del document["weight_map"][name]

    files.rewrite_json(ckpt / INDEX, drop)
    (line,) = problems(ckpt)
    assert line.startswith(f"{ckpt / INDEX}: ")
    assert " and 2 more: missing: this model needs it" in line


@pytest.mark.parametrize(
    "name", ["layers.1.attn.compressor.ape", "layers.0.ffn.gate.tid2eid", "layers.3.attn_norm.weight", "model.norm.weight"]
)
def test_tensors_of_another_model(ckpt: Path, name: str) -> None:
    first = shards(ckpt)[0]
    files.rewrite_header(first, lambda h: {name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, **h})
    files.rewrite_json(ckpt / INDEX, lambda d: d["weight_map"].update({name: first.name}))
    assert f"{name}: not a tensor of this model" in only(ckpt)


def test_skipped_tensors_are_no_problem(ckpt: Path) -> None:
    first = shards(ckpt)[0]
    names = ["mtp.0.attn.wkv.weight", "vision.x", "image_start", "layers.0.ffn.gate.bias_vl"]
    extra = {n: {"dtype": "F8_E4M3", "shape": [0], "data_offsets": [0, 0]} for n in names}
    files.rewrite_header(first, lambda h: {**extra, **h})
    files.rewrite_json(ckpt / INDEX, lambda d: d["weight_map"].update(dict.fromkeys(names, first.name)))
    checkpoint = Checkpoint.open(ckpt)
    assert checkpoint.has(names[0])
    assert not {n for n, _ in checkpoint.dense_names} & set(names)


def test_v4_checkpoint(ckpt: Path) -> None:
    files.rewrite_json(ckpt / "config.json", lambda c: c.update(model_type="deepseek_v4"))
    assert any("model_type: expected 'deepseek_v41', found 'deepseek_v4'" in line for line in problems(ckpt))


def test_config_of_another_size(ckpt: Path) -> None:
    files.rewrite_json(ckpt / "config.json", lambda c: c["text_config"].update(moe_intermediate_size=192))
    found = problems(ckpt)
    assert any("layers.0.ffn.experts.0.w1.weight and 7 more: expected I8 [192, 48], found I8 [160, 48]" in line for line in found), found


def test_config_and_shard_problems_come_together(ckpt: Path) -> None:
    files.rewrite_json(ckpt / "config.json", lambda c: c["text_config"].pop("hc_mult") and None)
    (ckpt / "tokenizer.json").unlink()
    shards(ckpt)[0].unlink()
    found = problems(ckpt)
    assert len(found) == 3
    assert ["hc_mult" in found[0], "tokenizer.json: missing" in found[1], str(shards(ckpt)[0].parent) in found[2]] == [True] * 3


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {}}', "[" * 100_000]
)
def test_broken_index(ckpt: Path, text: str) -> None:
    (ckpt / INDEX).write_text(text)
    assert only(ckpt).startswith(f"{ckpt / INDEX}: ")


@pytest.mark.parametrize("shard", ["../other/model.safetensors", "/etc/passwd", "", "..", "a\0b", "\ud800"])
def test_index_that_points_elsewhere(ckpt: Path, shard: str) -> None:
    files.rewrite_json(ckpt / INDEX, lambda d: d["weight_map"].update({"norm.weight": shard}))
    assert "expected plain file names" in only(ckpt)


def test_index_total_that_is_wrong_is_a_warning(ckpt: Path) -> None:
    files.rewrite_json(ckpt / INDEX, lambda d: d["metadata"].update(total_size=5))
    assert "total_size says 5" in Checkpoint.open(ckpt).warnings[0]


@pytest.mark.parametrize("name", ["config.json", INDEX, "tokenizer.json"])
def test_missing_files(ckpt: Path, name: str) -> None:
    (ckpt / name).unlink()
    assert name in only(ckpt)


def test_no_directory(tmp_path: Path) -> None:
    assert "found nothing" in only(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    assert "found a file" in only(tmp_path / "file")


class Unprivileged:
    """Without the rights that root has over every file."""

    def __enter__(self) -> None:
        self.root = os.geteuid() == 0
        if self.root:
            os.seteuid(65534)

    def __exit__(self, *_) -> None:
        if self.root:
            os.seteuid(0)


@pytest.mark.parametrize("which", ["", "config.json", INDEX, "tokenizer.json", "model-00002-of-00006.safetensors"])
def test_without_permission(sound: Path, which: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        directory = Path(shutil.copytree(sound, Path(folder) / "checkpoint"))
        directory.chmod(0o755)
        for path in directory.iterdir():
            path.chmod(0o644)
        with Unprivileged():
            Checkpoint.open(directory)
        (directory / which).chmod(0)
        with Unprivileged():
            line = only(directory)
        directory.chmod(0o755)
    assert line.startswith(str(directory / which) + ": ")
    assert "Permission denied" in line
