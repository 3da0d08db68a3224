"""The schema against the published totals of the release, and against the golden checkpoints' own index."""

import json
import math
from pathlib import Path

import pytest

from evrun.expert_worker.wire.checkpoint.config import load_config
from evrun.expert_worker.wire.checkpoint.dtypes import ITEM_BYTES
from evrun.expert_worker.wire.checkpoint.schema import EXPERT_PARTS, expert_specs, is_engram_table, is_skipped, other_specs, text_schema
from evrun.launch.export import geometry

GOLDEN = Path(__file__).parents[1] / "golden"


def release():
    return geometry.make_config(geometry.values("release"), 99092)


def size(spec) -> int:
    return ITEM_BYTES[spec[0]] * math.prod(spec[1])


def test_release_totals() -> None:
    config = release()
    specs = text_schema(config)
    unused_bias = config.num_hidden_layers  # bias_vl of every gate is counted by the published totals and skipped here
    assert len(specs) + unused_bias == 93418
    assert sum(map(size, specs.values())) + unused_bias * 384 * 4 == 501_382_611_408
    experts = {n: s for n, s in specs.items() if ".experts." in n}
    assert len(experts) == 92160
    assert sum(map(size, experts.values())) == 288_777_830_400
    engram = {n: s for n, s in specs.items() if ".engram." in n}
    assert len(engram) == 12
    assert sum(map(size, engram.values())) == 203_073_076_240
    assert config.engram_num_embeddings == (384006168, 384016682)
    assert config.row_bytes == 18_800_640 == sum(map(size, expert_specs(config)))


def test_release_schedule_follows_from_its_layer_count() -> None:
    config = release()
    assert config.compress_ratios == (0, 0) + (2,) * 18 + (1,) * 20
    assert config.kv_source_layer_ids == (2, 8, 14, 20)
    assert config.index_source_layer_ids == (2, 8, 14, 20, 24, 28, 32, 36)
    assert (config.candidate_source_layer_id, config.engram_layer_ids) == (20, (1, 14))


def test_release_shapes() -> None:
    specs = other_specs(release())
    assert specs["layers.0.attn.wq_b.scale"] == ("F8_E8M0", (1024, 40))
    assert specs["layers.0.attn.wo_a.weight"] == ("F8_E4M3", (8192, 4096))
    assert specs["layers.7.hc_ffn_fn"] == ("F32", (24, 20480))
    assert specs["layers.2.attn.compressor.wgate.weight"] == ("BF16", (512, 5120))
    assert "layers.20.attn.compressor.wgate.weight" not in specs  # ratio 1 has no gate
    assert specs["layers.24.attn.indexer.wq_b.weight"] == ("F8_E4M3", (4096, 1280))
    assert "layers.24.attn.indexer.wk.weight" not in specs  # keys belong to KV sources
    assert specs["layers.14.engram.wkv.weight"] == ("F8_E4M3", (25600, 6144))
    assert dict(zip(EXPERT_PARTS, expert_specs(release()), strict=True))["w2.scale"] == ("F8_E8M0", (5120, 72))


@pytest.mark.parametrize("name", ["minimal", "full", "long"])
def test_golden_names_are_exactly_the_schema_and_what_is_skipped(name: str) -> None:
    directory = GOLDEN / name / "checkpoint"
    names = set(json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"])
    wanted = set(text_schema(load_config(directory)))
    assert wanted <= names
    assert all(is_skipped(n) for n in names - wanted)
    assert not any(is_skipped(n) for n in wanted)


def test_skipped_and_tables() -> None:
    assert is_skipped("mtp.0.attn.wkv.scale")
    assert is_skipped("image_newline")
    assert is_skipped("layers.3.ffn.gate.bias_vl")
    assert not is_skipped("layers.3.ffn.gate.bias")
    assert is_engram_table("layers.1.engram.embed.scale")
    assert not is_engram_table("layers.1.engram.wkv.scale")
    assert not is_engram_table("embed.weight")
