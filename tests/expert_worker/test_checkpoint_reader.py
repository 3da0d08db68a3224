"""Tensors of an opened checkpoint: found through the index, views of mappings, bound to the files that were checked."""

import gc
import json
import os
import shutil
from pathlib import Path

import checkpoint_files as files
import numpy as np
import pytest

from evrun.expert_worker.wire.checkpoint.payload import check_e4m3, check_finite, check_payload, check_scales
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.checkpoint.schema import EXPERT_PARTS, text_schema
from evrun.expert_worker.wire.errors import CheckpointError, PayloadError

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("sound") / "checkpoint"
    files.write_mini(directory)
    return directory


@pytest.fixture
def ckpt(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "checkpoint"))


@pytest.mark.parametrize("name", ["minimal", "full", "long"])
def test_golden_checkpoints_open_cleanly(name: str) -> None:
    directory = GOLDEN / name / "checkpoint"
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.warnings == []
    raw = files.Raw(directory)
    for tensor in raw.weight_map:
        assert checkpoint.tensor(tensor).data.tobytes() == raw[tensor]
    for tensor, size in checkpoint.dense_names:
        check_payload(checkpoint.tensor(tensor))
        assert checkpoint.tensor(tensor).data.nbytes == size


@pytest.mark.parametrize("scatter", [0, 5])
def test_every_tensor_has_the_bytes_of_its_file(tmp_path: Path, scatter: int) -> None:
    config = files.write_mini(tmp_path / "c", scatter=scatter)
    checkpoint = Checkpoint.open(tmp_path / "c")
    assert checkpoint.config == config
    raw = files.Raw(tmp_path / "c")
    for name, (dtype, shape) in text_schema(config).items():
        tensor = checkpoint.tensor(name)
        assert checkpoint.has(name)
        assert (tensor.name, tensor.dtype, tensor.shape) == (name, dtype, shape)
        assert tensor.data.tobytes() == raw[name]
        assert tensor.data.shape[:-1] == shape[:-1]
        assert tensor.data.flags.c_contiguous
        assert not tensor.data.flags.writeable
        assert tensor.shard == files.shard_of(tmp_path / "c", name)


def test_weight_and_scale_in_different_shards(tmp_path: Path) -> None:
    config = files.write_mini(tmp_path / "c", scatter=7)
    checkpoint = Checkpoint.open(tmp_path / "c")
    raw = files.Raw(tmp_path / "c")
    apart = 0
    for layer in range(config.num_hidden_layers):
        for expert in range(config.n_routed_experts):
            tensors = checkpoint.expert(layer, expert)
            assert [t.name for t in tensors] == [f"layers.{layer}.ffn.experts.{expert}.{part}" for part in EXPERT_PARTS]
            assert all(t.data.tobytes() == raw[t.name] for t in tensors)
            apart += tensors[0].shard != tensors[1].shard
    assert apart > 0


def test_unknown_names(sound: Path) -> None:
    checkpoint = Checkpoint.open(sound)
    for name in ("nothing", "layers.0.ffn.experts.4.w1.weight", "layers.00.ffn.experts.0.w1.weight", "layers.0.ffn.experts.-1.w1.weight"):
        assert not checkpoint.has(name)
        with pytest.raises(KeyError):
            checkpoint.tensor(name)
    for layer, expert in ((3, 0), (0, 4), (-1, 0), (0, -1)):
        with pytest.raises(IndexError):
            checkpoint.expert(layer, expert)


def test_sizes(sound: Path) -> None:
    checkpoint = Checkpoint.open(sound)
    total = files.index(sound)["metadata"]["total_size"]
    assert checkpoint.dense_bytes + checkpoint.expert_bytes + checkpoint.engram_bytes == total
    assert checkpoint.expert_bytes == 12 * sum(t.data.nbytes for t in checkpoint.expert(0, 0))
    names = [name for name, _ in checkpoint.dense_names]
    assert not any(".experts." in n or n.endswith(("engram.embed.weight", "engram.embed.scale")) for n in names)
    assert "layers.1.engram.wkv.weight" in names
    places = [(checkpoint.tensor(n).shard, checkpoint.tensor(n).offset) for n in names]
    assert places == sorted(places)


def mapped(directory: Path) -> set[str]:
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(directory) in line}


def test_shards_are_mapped_at_first_use_only(sound: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(sound, tmp_path / "lazy"))
    checkpoint = Checkpoint.open(directory)
    assert mapped(directory) == set()
    tensor = checkpoint.tensor("norm.weight")
    assert mapped(directory) == {str(tensor.shard)}
    whole = checkpoint.mapping(tensor.shard)
    assert whole.nbytes == tensor.shard.stat().st_size
    assert whole[tensor.offset : tensor.offset + tensor.data.nbytes].tobytes() == tensor.data.tobytes()
    del checkpoint, tensor, whole
    gc.collect()
    assert mapped(directory) == set()


def test_identity_of_the_same_files_is_accepted(sound: Path) -> None:
    identity = Checkpoint.open(sound).identity()
    assert set(identity) == {str(p.resolve()) for p in sound.glob("model-*.safetensors")}
    through_json = {k: tuple(v) for k, v in json.loads(json.dumps(identity)).items()}
    assert Checkpoint.open(sound, through_json).identity() == identity


def test_replaced_shard_is_refused_naming_both(ckpt: Path) -> None:
    identity = Checkpoint.open(ckpt).identity()
    shard = files.shard_of(ckpt, "norm.weight")
    copy = shard.with_suffix(".new")
    shutil.copy2(shard, copy)
    os.replace(copy, shard)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(ckpt, identity)
    (line,) = caught.value.problems
    inode = os.stat(shard).st_ino
    assert line.startswith(f"{shard}: not the file this run was started with")
    assert f"inode {identity[str(shard.resolve())][1]} " in line
    assert f"inode {inode} " in line
    Checkpoint.open(ckpt)


def test_touched_shard_is_refused(ckpt: Path) -> None:
    identity = Checkpoint.open(ckpt).identity()
    os.utime(files.shard_of(ckpt, "norm.weight"), (1, 1))
    with pytest.raises(CheckpointError, match="mtime 1000000000 ns"):
        Checkpoint.open(ckpt, identity)


def test_link_that_points_to_another_file_now(ckpt: Path, tmp_path: Path) -> None:
    shard = files.shard_of(ckpt, "norm.weight")
    for name in ("a", "b"):
        shutil.copy2(shard, tmp_path / name)
    shard.unlink()
    shard.symlink_to(tmp_path / "a")
    identity = Checkpoint.open(ckpt).identity()
    shard.unlink()
    shard.symlink_to(tmp_path / "b")
    with pytest.raises(CheckpointError, match=f"found {tmp_path / 'b'}"):
        Checkpoint.open(ckpt, identity)


def test_shard_replaced_between_open_and_first_use(ckpt: Path) -> None:
    checkpoint = Checkpoint.open(ckpt)
    kept = checkpoint.tensor("embed.weight").data.tobytes()
    for path in ckpt.glob("model-*.safetensors"):
        shutil.copy2(path, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)
    assert checkpoint.tensor("embed.weight").data.tobytes() == kept  # mapped before: still the old file
    with pytest.raises(CheckpointError, match="not the file this run was started with"):
        checkpoint.tensor("norm.weight")


def test_renamed_directory_keeps_what_is_mapped(ckpt: Path) -> None:
    checkpoint = Checkpoint.open(ckpt)
    before = checkpoint.tensor("embed.weight").data.tobytes()
    ckpt.rename(ckpt.with_name("elsewhere"))
    assert checkpoint.tensor("embed.weight").data.tobytes() == before
    with pytest.raises(CheckpointError, match="cannot be opened any more"):
        checkpoint.tensor("norm.weight")


@pytest.mark.parametrize("name", ["layers.1.ffn.experts.2.w2.scale", "layers.0.attn.wo_b.scale"])
def test_scale_byte_255(ckpt: Path, name: str) -> None:
    checkpoint = Checkpoint.open(ckpt)
    columns = checkpoint.tensor(name).shape[-1]
    check_scales(checkpoint.tensor(name))
    files.poke(ckpt, name, 2 * columns + 1, 255)
    with pytest.raises(PayloadError) as caught:
        check_payload(Checkpoint.open(ckpt).tensor(name))
    assert caught.value.exit_code == 5
    assert f"{files.shard_of(ckpt, name)}: {name}, row 2, column 1: E8M0 byte 255" in str(caught.value)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_code_of_e4m3(ckpt: Path, code: int) -> None:
    name = "layers.1.attn.wkv.weight"
    check_e4m3(Checkpoint.open(ckpt).tensor(name))
    files.poke(ckpt, name, 96 * 63 + 95, code)
    with pytest.raises(PayloadError, match="row 63, column 95: NaN code"):
        check_payload(Checkpoint.open(ckpt).tensor(name))


@pytest.mark.parametrize(("name", "byte", "value"), [("norm.weight", 7, 0x7F), ("layers.0.hc_attn_fn", 4 * 384 + 3, 0xFF)])
def test_infinite_numbers(ckpt: Path, name: str, byte: int, value: int) -> None:
    check_finite(Checkpoint.open(ckpt).tensor(name))
    files.poke(ckpt, name, byte, value)
    files.poke(ckpt, name, byte - 1, 0x80)
    with pytest.raises(PayloadError, match="infinity or NaN"):
        check_payload(Checkpoint.open(ckpt).tensor(name))


def test_bad_values_are_found_beyond_the_first_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_mini(tmp_path / "c")
    files.poke(tmp_path / "c", "embed.weight", 2 * (96 * 351 + 95), 0x80)
    files.poke(tmp_path / "c", "embed.weight", 2 * (96 * 351 + 95) + 1, 0x7F)
    monkeypatch.setattr("evrun.expert_worker.wire.checkpoint.payload.PIECE_BYTES", 1024)
    with pytest.raises(PayloadError, match="row 351, column 95"):
        check_payload(Checkpoint.open(tmp_path / "c").tensor("embed.weight"))


def test_packed_codes_have_no_bad_values(sound: Path) -> None:
    tensor = Checkpoint.open(sound).tensor("layers.0.ffn.experts.0.w1.weight")
    assert np.unique(tensor.data).size > 200
    check_payload(tensor)
