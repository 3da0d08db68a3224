"""`evrun make-checkpoint` and the exporter: the release's format, any geometry, whole or not at all."""

import dataclasses
import errno
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkpoint_files as files
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from evrun.coordinator.engram_hash import EngramHash
from evrun.coordinator.engram_map import cached_token_map
from evrun.expert_worker.wire.checkpoint.config import load_config, validate
from evrun.expert_worker.wire.checkpoint.payload import check_payload
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.checkpoint.schema import is_engram_table, text_schema
from evrun.expert_worker.wire.errors import RunError, UsageError
from evrun.launch.export import geometry, tokenizer
from evrun.launch.export.checkpoint import complete, write_checkpoint
from evrun.launch.export.plan import plan_shards
from evrun.launch.export.weights import RandomWeights
from evrun.launch.make_checkpoint import make_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"


def run(*args: str):
    return CliRunner().invoke(make_checkpoint, list(args))


def test_command_writes_a_checkpoint_that_opens(tmp_path: Path) -> None:
    result = run(str(tmp_path / "c"), "--layers", "4", "--experts", "5", "--top-k", "2", "--seed", "3")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{tmp_path / 'c'}: 4 layers x 5 experts of 96 x 160, ")
    checkpoint = Checkpoint.open(tmp_path / "c")
    assert checkpoint.warnings == []
    assert (checkpoint.config.num_hidden_layers, checkpoint.config.n_routed_experts, checkpoint.config.num_experts_per_tok) == (4, 5, 2)
    assert sorted(p.name for p in (tmp_path / "c").iterdir() if "model" not in p.name) == [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in text_schema(checkpoint.config):
        check_payload(checkpoint.tensor(name))


def test_every_option_of_the_geometry_reaches_the_config(tmp_path: Path) -> None:
    wanted = {
        "vocab": ("vocab_size", 300),
        "hidden": ("hidden_size", 64),
        "intermediate": ("moe_intermediate_size", 96),
        "layers": ("num_hidden_layers", 5),
        "experts": ("n_routed_experts", 6),
        "top-k": ("num_experts_per_tok", 4),
        "heads": ("num_attention_heads", 6),
        "head-dim": ("head_dim", 32),
        "rope-dim": ("qk_rope_head_dim", 8),
        "q-rank": ("q_lora_rank", 32),
        "o-rank": ("o_lora_rank", 32),
        "o-groups": ("o_groups", 3),
        "window": ("sliding_window", 5),
        "max-context": ("max_position_embeddings", 999),
        "index-heads": ("index_n_heads", 2),
        "index-head-dim": ("index_head_dim", 64),
        "index-topk": ("index_topk", 3),
        "candidate-source": ("candidate_source_layer_id", 3),
        "candidate-blocks": ("candidate_topk_blocks", 2),
        "candidate-block-size": ("candidate_block_size", 2),
        "streams": ("hc_mult", 3),
        "sinkhorn": ("hc_sinkhorn_iters", 7),
        "engram-ngram": ("engram_max_ngram_size", 5),
        "engram-heads": ("engram_n_heads", 1),
        "engram-head-dim": ("engram_head_dim", 64),
        "engram-vocab-size": ("engram_vocab_size", 11),
        "swiglu-limit": ("swiglu_limit", 1.5),
        "route-scale": ("routed_scaling_factor", 2.5),
        "ratios": ("compress_ratios", (1, 0, 2, 1, 1)),
        "kv-sources": ("kv_source_layer_ids", (0, 2, 3)),
        "index-sources": ("index_source_layer_ids", (0, 2, 3, 4)),
        "engram-layers": ("engram_layer_ids", (0, 4)),
    }
    as_text = {k: ",".join(map(str, v)) if isinstance(v, tuple) else str(v) for k, (_, v) in wanted.items()}
    flags = [part for k, v in as_text.items() for part in (f"--{k}", v)]
    result = run(str(tmp_path / "c"), *flags, "--yarn-factor", "3", "--yarn-original", "128")
    assert result.exit_code == 0, (result.output, result.exception)
    config = Checkpoint.open(tmp_path / "c").config
    assert {k: getattr(config, k) for k, _ in wanted.values()} == dict(wanted.values())
    assert (config.rope_scaling.factor, config.rope_scaling.original_max_position_embeddings) == (3.0, 128)
    declared = {f.name for f in dataclasses.fields(config)}
    fixed = {"rms_norm_eps", "hc_eps", "rope_theta", "compress_rope_theta", "n_shared_experts", "engram_pad_token_id", "bos_token_id"}
    derived = {"engram_num_embeddings", "engram_compressed_vocab_size", "rope_scaling", "eos_token_id"}
    assert declared == {k for k, _ in wanted.values()} | fixed | derived


def test_no_engram(tmp_path: Path) -> None:
    assert run(str(tmp_path / "c"), "--layers", "2", "--engram-layers", "none").exit_code == 0
    checkpoint = Checkpoint.open(tmp_path / "c")
    assert checkpoint.config.engram_layer_ids == checkpoint.config.engram_num_embeddings == ()
    assert checkpoint.engram_bytes == 0


def test_presets_are_listed_and_valid() -> None:
    listing = run("--presets").stdout
    for name in geometry.PRESETS:
        assert name in listing
        config = geometry.make_config(geometry.values(name), 200)
        assert validate(config) == []
    full_rows = geometry.make_config(geometry.values("full-rows"), 200)
    assert full_rows.row_bytes == 18_800_640


def test_tiny_has_no_two_equal_sizes() -> None:
    c = geometry.make_config(geometry.values("tiny"), 200)
    sizes = [
        c.hidden_size,
        c.moe_intermediate_size,
        c.hidden_size // 2,
        c.moe_intermediate_size // 2,
        c.num_attention_heads * c.head_dim,
        c.num_attention_heads * c.head_dim // c.o_groups,
        c.head_dim,
        c.q_lora_rank,
        c.o_groups * c.o_lora_rank,
        c.index_n_heads * c.index_head_dim,
        c.index_head_dim,
        c.hc_mult * c.hidden_size,
        (c.hc_mult + 1) * c.hidden_size,
        (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim,
        c.vocab_size,
        c.n_routed_experts,
    ]
    assert len(set(sizes)) == len(sizes)


@settings(max_examples=40)
@given(st.integers(1, 60))
def test_derived_schedules_are_valid_for_any_number_of_layers(layers: int) -> None:
    assert validate(geometry.make_config(geometry.values("tiny", num_hidden_layers=layers), 200)) == []


@settings(max_examples=40)
@given(st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=12))
def test_schedules_of_given_ratios_are_valid(ratios: list[int]) -> None:
    config = geometry.make_config(geometry.values("tiny", num_hidden_layers=len(ratios), compress_ratios=tuple(ratios)), 200)
    assert config.compress_ratios == tuple(ratios)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--hidden", "100"], "hidden_size: expected a multiple of 32"),
        (["--preset", "huge"], "unknown preset 'huge'; known: tiny"),
        (["--vocab", "100"], "vocab_size: expected 266"),
        (["--layers", "0"], "num_hidden_layers"),
        (["--ratios", "0,3"], "compress_ratios"),
        (["--top-k", "13"], "num_experts_per_tok: expected at most 12"),
    ],
)
def test_impossible_geometries_are_usage_errors(tmp_path: Path, flags: list[str], word: str) -> None:
    result = run(str(tmp_path / "c"), *flags)
    assert isinstance(result.exception, UsageError)
    assert word in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("flags", [["--ratios", "0,x"], ["--layout", "other"], ["--scatter", "-1"], ["--hidden", "many"]])
def test_malformed_options(tmp_path: Path, flags: list[str]) -> None:
    assert run(str(tmp_path / "c"), *flags).exit_code == 2


def payload_bytes(directory: Path) -> dict[str, bytes]:
    raw = files.Raw(directory)
    return {name: raw[name] for name in raw.weight_map}


def test_seed_decides_the_bytes_and_scatter_does_not(tmp_path: Path) -> None:
    for name, options in {"a": {}, "b": {}, "s": {"scatter": 4}, "c": {"seed": 1}}.items():
        files.write_mini(tmp_path / name, **options)
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    assert payload_bytes(tmp_path / "a") == payload_bytes(tmp_path / "s")
    other = payload_bytes(tmp_path / "c")
    assert all(other[name] != data for name, data in payload_bytes(tmp_path / "a").items() if name.endswith("weight"))


def test_one_shard_per_layer_and_experts_never_split() -> None:
    config = files.mini_config()
    plan = plan_shards(config)
    assert [s.file for s in plan] == [f"model-{i:05d}-of-00006.safetensors" for i in range(1, 7)]
    names = [{n for n, _ in s.tensors} for s in plan]
    assert names[0] == {"embed.weight"}
    assert names[4] == {"head.weight", "norm.weight"}
    assert all(n.startswith("layers.1.engram.") for n in names[5])
    assert len(names[5]) == 6
    for layer in range(3):
        assert all(n.startswith(f"layers.{layer}.") and ".engram." not in n for n in names[layer + 1])
    assert set.union(*names) == set(text_schema(config))


def test_scatter_takes_codes_and_scales_apart() -> None:
    plan = plan_shards(files.mini_config(), scatter=5, seed=1)
    where = {name: s.file for s in plan for name, _ in s.tensors}
    assert len(plan) == 5
    assert set(where) == set(text_schema(files.mini_config()))
    pairs = [(n, n.removesuffix("weight") + "scale") for n in where if n.endswith("weight")]
    apart = [where[w] != where[s] for w, s in pairs if s in where]
    assert sum(apart) > len(apart) / 2
    assert plan != plan_shards(files.mini_config(), scatter=5, seed=2)


@pytest.mark.parametrize("layout", ["nested", "flat", "both"])
def test_config_layouts(tmp_path: Path, layout: str) -> None:
    config = files.write_mini(tmp_path / "c", layout=layout)
    assert (tmp_path / "c/config.json").exists() == (layout != "flat")
    assert (tmp_path / "c/inference/config.json").exists() == (layout != "nested")
    assert Checkpoint.open(tmp_path / "c").config == config


def test_other_readers_accept_the_files(tmp_path: Path) -> None:
    from safetensors import safe_open

    files.write_mini(tmp_path / "c")
    for path in (tmp_path / "c").glob("*.safetensors"):
        with safe_open(path, "numpy") as shard:
            assert set(shard.keys()) == set(files.read_header(path)) - {"__metadata__"}


def test_documents_have_the_keys_of_the_golden_ones(tmp_path: Path) -> None:
    files.write_mini(tmp_path / "c")

    def keys(path: Path) -> tuple[set[str], ...]:
        c = json.loads(path.read_text())
        return set(c), set(c["text_config"]), set(c["text_config"]["rope_scaling"]), set(c["quantization_config"])

    assert keys(tmp_path / "c/config.json") == keys(GOLDEN / "minimal/checkpoint/config.json")
    ours, golden = ((d / "tokenizer_config.json").read_text() for d in (tmp_path / "c", GOLDEN / "minimal/checkpoint"))
    assert set(json.loads(ours)) == set(json.loads(golden))


@pytest.mark.parametrize("vocab", [266, 267, 290, 352, 4096])
def test_tokenizer(vocab: int) -> None:
    built = tokenizer.build(vocab)
    assert built.get_vocab_size() == vocab
    assert sorted(built.get_vocab().values()) == list(range(vocab))
    assert [built.token_to_id(t) for t in (tokenizer.BOS, tokenizer.EOS, tokenizer.PAD)] == [0, 1, 2]
    assert built.to_str() == tokenizer.build(vocab).to_str()
    text = "The quick brown fox, 1234 café 日本語 😀\n\n\tend  "
    again = Tokenizer.from_str(built.to_str())
    ids = again.encode(text, add_special_tokens=False).ids
    assert again.decode(ids) == text
    assert again.encode(f"{tokenizer.BOS}a").ids[0] == 0
    if vocab == 4096:  # the merges are used
        assert len(again.encode("there is another house on that street").ids) < 20


def test_engram_of_the_config_fits_the_tokenizer_and_the_tables(tmp_path: Path) -> None:
    config = files.write_mini(tmp_path / "c")
    hashing = EngramHash(config, cached_token_map(tmp_path / "c", config, tmp_path / "cache"))
    rows = hashing.rows(hashing.compress(np.arange(config.vocab_size)), 0)
    assert rows.max() < config.engram_num_embeddings[0]
    assert config.engram_compressed_vocab_size < config.vocab_size


def values_of(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A tensor as float64, by code of its own (spec 2.4)."""
    tensor = checkpoint.tensor(name)
    data = np.array(tensor.data)
    if tensor.dtype == "F32":
        return data.view(np.float32).astype(float)
    if tensor.dtype == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(float)
    scale = 2.0 ** (checkpoint.tensor(name.removesuffix("weight") + "scale").data.astype(float) - 127)
    if tensor.dtype == "I8":
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        codes = np.stack([data & 15, data >> 4], -1).reshape(len(data), -1)
        return table[codes] * scale.repeat(32, 1)
    exponent, mantissa = (data >> 3 & 15).astype(int), (data & 7) / 8
    magnitude = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    tiles = scale.repeat(32, 1) if is_engram_table(name) else scale.repeat(32, 0).repeat(32, 1)
    return np.where(data & 128, -magnitude, magnitude) * tiles


def test_statistics_are_those_of_the_golden_checkpoints(tmp_path: Path) -> None:
    """Spread times the root of the columns, so that other sizes compare; norms and biases as they are."""
    write_checkpoint(complete(geometry.values("tiny", n_routed_experts=8)), tmp_path / "c")
    ours, golden = Checkpoint.open(tmp_path / "c"), Checkpoint.open(GOLDEN / "full/checkpoint")
    for name in text_schema(ours.config):
        if name.endswith("scale") or not golden.has(name) or ours.tensor(name).data.size < 64:
            continue
        x, y = values_of(ours, name), values_of(golden, name)
        assert np.isfinite(x).all()
        by_columns = x.ndim > 1 and not name.endswith(("embed.weight", "q_weight", "k_weight"))
        mine, theirs = (v.std() * math.sqrt(v.shape[-1] if by_columns else 1) for v in (x, y))
        assert 0.7 < mine / theirs < 1.45, (name, mine, theirs)
        assert abs(x.mean() - y.mean()) < (0.4 if name.endswith("base") else 0.15), name


def test_random_payload_comes_in_bounded_pieces_without_bad_codes() -> None:
    config = geometry.make_config(geometry.values("full-rows"), 200)
    weights = RandomWeights(config, 0)
    schema = text_schema(config)
    for name in (
        "layers.0.ffn.experts.0.w1.weight",
        "layers.0.ffn.experts.0.w1.scale",
        "layers.1.ffn.shared_experts.w2.weight",
        "embed.weight",
    ):
        sizes, seen = 0, np.zeros(256, bool)
        for piece in weights(name, schema[name]):
            assert piece.nbytes <= 4 << 20
            sizes += piece.nbytes
            seen[np.unique(piece.view(np.uint8))] = True
        assert sizes == math.prod(schema[name][1]) * (2 if schema[name][0] == "BF16" else 1)
        if schema[name][0] == "F8_E8M0":
            assert 0 < seen[100:130].sum() <= 2
            assert not seen[255]
        if schema[name][0] == "F8_E4M3":
            assert not seen[0x7F]
            assert not seen[0xFF]


def test_payload_of_a_trained_model(tmp_path: Path) -> None:
    """The same writer with bytes from elsewhere, here from another checkpoint."""
    source = Checkpoint.open(GOLDEN / "minimal/checkpoint")
    built = Tokenizer.from_file(str(GOLDEN / "minimal/checkpoint/tokenizer.json"))
    write_checkpoint(source.config, tmp_path / "c", payload=lambda name, spec: [source.tensor(name).data], built=built)
    copy = Checkpoint.open(tmp_path / "c")
    assert copy.config == source.config
    for name in text_schema(source.config):
        assert (copy.tensor(name).data == source.tensor(name).data).all()


def test_payload_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    config = files.mini_config()
    weights = RandomWeights(config, 0)

    def short(name, spec):
        pieces = list(weights(name, spec))
        return pieces[:-1] if name == "norm.weight" else pieces

    with pytest.raises(RunError, match=r"norm.weight: expected 192 bytes of payload for BF16 \[96\], found 0"):
        write_checkpoint(config, tmp_path / "c", payload=short)
    assert not (tmp_path / "c").exists()


def test_directory_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(UsageError, match="expected an empty directory, found 1 entries"):
        files.write_mini(tmp_path)
    assert os.listdir(tmp_path) == ["note.txt"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="Not a directory"):
        files.write_mini(tmp_path / "file" / "c")
    with pytest.raises(UsageError, match="Not a directory"):
        files.write_mini(tmp_path / "file")


def test_empty_directory_is_filled(tmp_path: Path) -> None:
    files.write_mini(tmp_path)
    assert Checkpoint.open(tmp_path).warnings == []


def test_force_replaces_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    files.write_mini(tmp_path / "c", scatter=9, layout="both")
    (tmp_path / "c/note.txt").write_text("mine")
    (tmp_path / "c/.partial-1").mkdir()
    config = files.mini_config(sliding_window=5)
    write_checkpoint(config, tmp_path / "c", force=True)
    checkpoint = Checkpoint.open(tmp_path / "c")
    assert checkpoint.config == config
    assert checkpoint.warnings == []
    assert (tmp_path / "c/note.txt").read_text() == "mine"
    assert not (tmp_path / "c/.partial-1").exists()


def left(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*"))


@pytest.mark.parametrize("existing", [False, True])
def test_full_disk(tmp_path: Path, existing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if existing:
        (tmp_path / "c").mkdir()
    calls = []

    def full(*args: int) -> None:
        calls.append(args)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("evrun.launch.export.writer.os.posix_fallocate", full)
    with pytest.raises(RunError) as caught:
        files.write_mini(tmp_path / "c")
    assert caught.value.exit_code == 5
    assert "No space left on device" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert left(tmp_path) == (["c"] if existing else [])


def test_more_than_the_disk_has_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evrun.launch.export.writer.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(RunError, match=r"takes \d+ bytes, 1000 are free"):
        files.write_mini(tmp_path / "c")
    assert left(tmp_path) == []


COMMAND = [sys.executable, "-c", "from evrun.launch.make_checkpoint import make_checkpoint as m; m(standalone_mode=False)"]


def test_write_error_in_the_middle(tmp_path: Path) -> None:
    """A real one: no file may grow beyond 300 kB."""
    limit = (300_000, 300_000)
    command = [*COMMAND, str(tmp_path / "c")]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    )
    assert result.returncode == 1
    assert "RunError" in result.stderr
    assert "File too large" in result.stderr
    assert left(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    command = [*COMMAND, str(tmp_path / "c"), "--preset", "small", "--layers", "24"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not list(tmp_path.glob("c/.partial-*/model-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(30) != 0
    finally:
        process.kill()
        process.wait()
    assert left(tmp_path) == []


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = files.mini_config()
    total = write_checkpoint(config, tmp_path / "c", progress=lambda done, of: seen.append((done, of)))
    assert seen[-1] == (total, total)
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)
    assert load_config(tmp_path / "c") == config
