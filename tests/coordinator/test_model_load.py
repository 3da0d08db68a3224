"""Loading: both forms of dense weights, progress, refusals; and what stays in the mapping."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import golden
import numpy as np
import pytest
import torch
from checkpoint_files import poke, write_mini

from evrun.coordinator import engram_map
from evrun.coordinator.models import registry
from evrun.coordinator.weights import DenseLoader
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.errors import PayloadError, UsageError


@pytest.mark.parametrize("variant", ["bf16", "fp32"])
def test_packed_and_expanded_dense_weights_give_equal_logits(variant: str) -> None:
    ids = golden.expected("full", variant, "chat")["token_ids"].tolist()
    expanded = golden.run("full", variant, ids, [5, 6]).logits
    packed = golden.run_on(golden.model("full", variant, "fp8"), golden.experts("full", variant), ids, [5, 6]).logits
    assert torch.equal(packed, expanded)


@pytest.mark.parametrize("dense_dtype", ["fp8", "bfloat16"])
def test_progress_counts_every_dense_byte(dense_dtype: str) -> None:
    found = golden.checkpoint("full")
    seen: list[tuple[int, str]] = []
    golden.load(found, "bf16", dense_dtype, lambda done, what: seen.append((done, what)))
    assert sum(done for done, _ in seen) == found.dense_bytes
    assert {what for _, what in seen} == {name for name, _ in found.dense_names}
    assert len(seen) == len(found.dense_names)


def test_a_model_comes_by_its_name() -> None:
    arguments = {"dtype": "float32", "numerics": "reference", "dense_dtype": "fp8", "device": "cpu", "token_map": None}
    found = golden.checkpoint("minimal")
    model = registry.load_model(found, **arguments, progress=lambda done, what: None)
    assert model.config == found.config
    with pytest.raises(UsageError, match="unknown; known: deepseek_v41"):
        registry.load_model(found, **arguments, progress=lambda done, what: None, architecture="deepseek_v4")
    with pytest.raises(UsageError, match="dense dtype: expected one of fp8, bfloat16, found 'int4'"):
        registry.load_model(found, **arguments | {"dense_dtype": "int4"}, progress=lambda done, what: None)
    with pytest.raises(UsageError, match="token map"):
        registry.load_model(golden.checkpoint("full"), **arguments, progress=lambda done, what: None)


@pytest.mark.parametrize(
    ("tensor", "byte", "value", "what"),
    [
        ("layers.0.attn.wq_a.weight", 5, 0x7F, "row 0, column 5"),
        ("layers.1.attn.wo_b.scale", 3, 0xFF, "E8M0 byte 255"),
        ("layers.0.attn_norm.weight", 1, 0x7F, "BF16"),
        ("layers.2.hc_ffn_fn", 3, 0x7F, "F32"),
    ],
)
def test_a_damaged_dense_tensor_is_refused_while_loading(tmp_path: Path, tensor: str, byte: int, value: int, what: str) -> None:
    write_mini(tmp_path)
    if tensor.endswith(("norm.weight", "fn")):
        poke(tmp_path, tensor, byte - 1, 0x80)
    poke(tmp_path, tensor, byte, value)
    with pytest.raises(PayloadError, match=what) as caught:
        golden.load(Checkpoint.open(tmp_path), "fp32")
    assert tensor in str(caught.value)


@pytest.mark.parametrize(("part", "value"), [("embed.weight", 0xFF), ("embed.scale", 0xFF)])
def test_a_damaged_engram_row_is_refused_when_it_is_used(tmp_path: Path, part: str, value: int) -> None:
    config = write_mini(tmp_path)
    layer = config.engram_layer_ids[0]
    model = golden.load(Checkpoint.open(tmp_path), "fp32")
    rows = model.begin(np.array([7]), model.new_state(1), None).engram_rows[0, 0]
    width = config.engram_head_dim // (1 if part == "embed.weight" else 32)
    poke(tmp_path, f"layers.{layer}.engram.{part}", int(rows[2]) * width, value)
    found = Checkpoint.open(tmp_path)
    model = golden.load(found, "fp32")
    with pytest.raises(PayloadError, match=rf"layers.{layer}.engram.{part}, row {rows[2]}: "):
        model.forward([7], model.new_state(1), golden.LocalExperts(found, "fp32"))


def test_a_damaged_embedding_row_is_refused_when_it_is_used(tmp_path: Path) -> None:
    config = write_mini(tmp_path)
    for byte, value in ((0, 0x80), (1, 0x7F)):
        poke(tmp_path, "embed.weight", 9 * config.hidden_size * 2 + byte, value)
    found = Checkpoint.open(tmp_path)
    model, local = golden.load(found, "fp32"), golden.LocalExperts(found, "fp32")
    model.forward([8, 10], model.new_state(2), local)
    with pytest.raises(PayloadError, match=r"embed.weight, row 9: "):
        model.forward([8, 9], model.new_state(2), local)


def test_tables_are_gathered_and_not_loaded() -> None:
    found = golden.checkpoint("full")
    loader = DenseLoader(found, torch.device("cpu"), lambda done, what: None)
    table = loader.table("layers.1.engram.embed.weight")
    rows = np.array([[3, 2161], [0, 3]])
    wanted = np.array(found.tensor("layers.1.engram.embed.weight").data)[rows]
    gathered = table.gather(rows)
    assert gathered.shape == (2, 2, 32)
    assert torch.equal(gathered, torch.from_numpy(wanted))
    assert table.rows == 2162


def test_weights_outlive_the_mapping() -> None:
    """A dense tensor is a copy: what happens to the page cache later does not reach it."""
    loader = DenseLoader(golden.checkpoint("full"), torch.device("cpu"), lambda done, what: None)
    weight = loader.load("layers.0.attn.wq_a.weight")
    assert weight.dtype == torch.uint8
    before = weight.clone()
    weight += 1
    assert torch.equal(loader.load("layers.0.attn.wq_a.weight"), before)
    assert loader.load("norm.weight").dtype == torch.bfloat16
    assert loader.load("layers.0.attn.attn_sink").dtype == torch.float32


@pytest.mark.parametrize(("dtype", "dense_dtype"), [("bfloat16", "fp8"), ("float32", "bfloat16")])
def test_every_tensor_is_made_on_the_device_that_was_asked_for(dtype: str, dense_dtype: str) -> None:
    """On torch's `meta` device: a tensor made elsewhere, or a value looked at on the way, would raise."""
    found = golden.checkpoint("full")
    ids = engram_map.token_map(found.directory / "tokenizer.json", found.config.vocab_size)
    model = registry.load_model(
        found, dtype=dtype, numerics="reference", dense_dtype=dense_dtype, device="meta", token_map=ids, progress=lambda done, what: None
    )
    state = model.new_state(50)

    def experts(layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Callable[[], torch.Tensor]:
        assert {x.device.type, ids.device.type, weights.device.type} == {"meta"}
        return lambda: torch.zeros(x.shape, device="meta")

    logits = model.forward(range(40), state, experts, logits="all")
    assert (logits.device.type, logits.shape) == ("meta", (40, found.config.vocab_size))
    assert model.forward([3], state, experts).shape == (1, found.config.vocab_size)
