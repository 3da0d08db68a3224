"""Both config layouts, and everything that must be refused before a tensor is looked at."""

import dataclasses
import json
from pathlib import Path

import checkpoint_files as files
import pytest

from evrun.expert_worker.wire.checkpoint.config import load_config, parse, validate
from evrun.expert_worker.wire.errors import CheckpointError
from evrun.launch.export import documents, tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def config():
    return files.mini_config()


@pytest.fixture
def folder(tmp_path: Path, config) -> Path:
    """A directory with the nested config and the tokenizer's files."""
    (tmp_path / "config.json").write_text(documents.nested(config, 9))
    (tmp_path / "tokenizer.json").write_text(tokenizer.build(config.vocab_size).to_str())
    (tmp_path / "tokenizer_config.json").write_text(tokenizer.settings(4096))
    (tmp_path / "inference").mkdir()
    return tmp_path


def problems(folder: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        load_config(folder)
    assert caught.value.exit_code == 3
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


def edit(folder: Path, **text_values) -> None:
    files.rewrite_json(folder / "config.json", lambda c: c["text_config"].update(text_values))


def test_nested(folder: Path, config) -> None:
    assert load_config(folder) == config


def test_flat_alone(folder: Path, config) -> None:
    (folder / "config.json").unlink()
    (folder / "inference/config.json").write_text(documents.flat(config))
    assert load_config(folder) == config


def test_both_agree(folder: Path, config) -> None:
    (folder / "inference/config.json").write_text(documents.flat(config))
    assert load_config(folder) == config


def test_a_layout_is_told_by_its_content_not_by_its_place(folder: Path, config) -> None:
    (folder / "inference/config.json").write_text((folder / "config.json").read_text())
    (folder / "config.json").write_text(documents.flat(config))
    assert load_config(folder) == config


def test_both_disagree(folder: Path, config) -> None:
    other = dataclasses.replace(config, sliding_window=16, swiglu_limit=7.0)
    (folder / "inference/config.json").write_text(documents.flat(other))
    found = problems(folder)
    assert [line.split(":")[0] for line in found] == ["swiglu_limit", "sliding_window"]
    assert "config.json says 8, inference/config.json says 16" in found[1]


def test_ratios_of_draft_layers_are_cut_off() -> None:
    full = load_config(GOLDEN / "full/checkpoint")
    assert len(full.compress_ratios) == full.num_hidden_layers == 10


def test_flat_special_tokens_that_no_file_names_are_an_error(folder: Path, config) -> None:
    (folder / "config.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    (folder / "inference/config.json").write_text(documents.flat(config))
    assert any("bos_token_id" in line for line in problems(folder))


def test_nothing_there(tmp_path: Path) -> None:
    assert "neither config.json nor inference/config.json" in problems(tmp_path)[0]


@pytest.mark.parametrize("text", ["", "{", "[]", "\ud800".encode("utf-8", "surrogatepass"), b"\xff", "[" * 100_000])
def test_no_json_object(folder: Path, text) -> None:
    (folder / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    assert str(folder / "config.json") in problems(folder)[0]


def test_dangling_link(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder / "blob")
    assert "link's target" in problems(folder)[0]


def test_v4_config_is_refused(folder: Path) -> None:
    v4 = {"model_type": "deepseek_v4", "hidden_size": 4096, "compress_ratios": [0, 4, 128], "num_hash_layers": 3}
    (folder / "config.json").write_text(json.dumps(v4))
    found = "\n".join(problems(folder))
    assert "expected 'deepseek_v41', found 'deepseek_v4'" in found


def test_v4_reference_config_is_refused(folder: Path, config) -> None:
    flat = json.loads(documents.flat(config)) | {"compress_ratios": [0, 4, 128], "expert_dtype": None}
    del flat["kv_source_layers"], flat["hc_eps"]
    (folder / "config.json").unlink()
    (folder / "inference/config.json").write_text(json.dumps(flat))
    found = problems(folder)
    assert any("missing keys: kv_source_layers, hc_eps" in line for line in found)
    assert any("expert_dtype: expected 'fp4', found None" in line for line in found)


def test_v4_ratios_in_an_otherwise_right_config(folder: Path) -> None:
    edit(folder, compress_ratios=[0, 4, 128])
    assert "V4 has other ratios" in problems(folder)[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [("weight_block_size", [128, 128]), ("scale_fmt", "float"), ("expert_dtype", "fp8"), ("quant_method", "gptq")],
)
def test_other_quantisation(folder: Path, key: str, value) -> None:
    files.rewrite_json(folder / "config.json", lambda c: c["quantization_config"].update({key: value}))
    (line,) = problems(folder)
    assert f"quantization_config.{key}" in line
    assert repr(value) in line


def test_missing_keys_are_all_listed(folder: Path) -> None:
    def cut(c) -> None:
        for key in ("hc_mult", "swiglu_limit"):
            del c["text_config"][key]
        del c["text_config"]["rope_scaling"]["factor"], c["eos_token_id"], c["quantization_config"]

    files.rewrite_json(folder / "config.json", cut)
    found = problems(folder)
    assert any(
        "missing keys: text_config.swiglu_limit, text_config.hc_mult, text_config.rope_scaling.factor, eos_token_id" in p for p in found
    )
    assert any("quantization_config.scale_fmt: expected 'ue8m0', found nothing" in p for p in found)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"hidden_size": "96"}, "hidden_size: expected an integer, found '96'"),
        ({"hidden_size": True}, "hidden_size: expected an integer"),
        ({"hidden_size": 100}, "hidden_size: expected a multiple of 32"),
        ({"num_attention_heads": 9}, "num_attention_heads: expected a multiple of o_groups"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a positive number"),
        ({"n_shared_experts": 2}, "n_shared_experts: expected 1"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok: expected at most 4"),
        ({"n_routed_experts": 10**12}, "n_routed_experts: expected at most"),
        ({"compress_ratios": [0, 2]}, "compress_ratios: expected one per layer, 3, found 2"),
        ({"kv_source_layer_ids": [2]}, "a source at or below layer 1"),
        ({"kv_source_layer_ids": [2, 1]}, "ascending layer ids"),
        ({"kv_source_layer_ids": [0, 1, 2]}, "expected 1 or 2 for a source layer, found 0"),
        ({"kv_source_layer_ids": [1]}, "ratio of its KV source 1"),
        ({"index_source_layer_ids": [1]}, "expected to hold KV source 2"),
        ({"index_head_dim": 40}, "index_head_dim: expected a multiple of 32"),
        ({"candidate_source_layer_id": 0}, "candidate_source_layer_id: expected -1 or an index source"),
        ({"candidate_source_layer_id": 1}, "no KV source between"),
        ({"engram_layer_ids": [1, 7]}, "engram_layer_ids: expected ascending layer ids below 3"),
        ({"engram_num_embeddings": []}, "engram_num_embeddings: expected 1 positive"),
        ({"engram_head_dim": 33}, "engram_head_dim: expected a multiple of 32"),
        ({"scoring_func": "softmax"}, "text_config.scoring_func: expected 'sqrtsoftplus', found 'softmax'"),
        ({"norm_topk_prob": 1}, "text_config.norm_topk_prob: expected True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"num_key_value_heads": 4}, "num_key_value_heads: expected 1"),
    ],
)
def test_impossible_values(folder: Path, values: dict, word: str) -> None:
    edit(folder, **values)
    assert any(word in line for line in problems(folder)), problems(folder)


def test_parse_reads_one_object(config) -> None:
    assert parse(json.loads(documents.nested(config, 9))) == config
    with pytest.raises(CheckpointError, match="model_type"):
        parse({"model_type": "llama"}, "there")


def test_golden_geometries_are_valid() -> None:
    for name in ("minimal", "full", "long"):
        assert validate(load_config(GOLDEN / name / "checkpoint")) == []
