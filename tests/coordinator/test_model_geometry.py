"""Geometries unlike the golden ones: head counts, groups, n-gram orders, schedules, streams; and long contexts in pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import golden
import numpy as np
import pytest
import torch
from checkpoint_files import write_mini
from steady import steady_sums

from evrun.coordinator.models.deepseek_v41 import indexer, sparse_attention
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint

Opener = Callable[[str], Checkpoint]

GEOMETRIES: dict[str, dict[str, Any]] = {
    "mini": {},
    "six-layers": {"num_hidden_layers": 6},
    "no-engram": {"engram_layer_ids": ()},
    "engram-on-layer-0": {"engram_layer_ids": (0, 2), "engram_max_ngram_size": 5},
    "bigrams": {"engram_max_ngram_size": 2, "engram_n_heads": 5},
    "no-candidates": {"num_hidden_layers": 6, "candidate_source_layer_id": -1},
    "ratios-in-any-order": {"num_hidden_layers": 7, "compress_ratios": (1, 1, 0, 2, 2, 1, 0)},
    "window-only": {"compress_ratios": (0, 0, 0), "candidate_source_layer_id": -1},
    "three-streams": {"hc_mult": 3, "num_attention_heads": 6, "o_groups": 3, "o_lora_rank": 64, "num_experts_per_tok": 1},
    "one-of-each": {"hc_mult": 1, "index_n_heads": 1, "num_attention_heads": 1, "o_groups": 1, "o_lora_rank": 32, "sliding_window": 1,
                    "index_topk": 1, "n_routed_experts": 1, "num_experts_per_tok": 1, "hc_sinkhorn_iters": 1},
    "whole-head-rotates": {"qk_rope_head_dim": 32, "head_dim": 32, "index_head_dim": 32},
    "re-index": {"num_hidden_layers": 6, "compress_ratios": (0, 2, 2, 1, 1, 1), "kv_source_layer_ids": (1, 3),
                 "index_source_layer_ids": (1, 2, 3, 4, 5), "candidate_source_layer_id": 3, "candidate_topk_blocks": 2,
                 "candidate_block_size": 3, "index_topk": 4},
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Opener:
    """Geometry by name -> its checkpoint, written once."""

    @functools.cache
    def opened(name: str) -> Checkpoint:
        folder = tmp_path_factory.mktemp(name)
        write_mini(folder, **GEOMETRIES[name])
        return Checkpoint.open(folder)

    return opened


def prompt(found: Checkpoint, length: int) -> list[int]:
    ids: list[int] = np.random.default_rng(1).integers(0, found.config.vocab_size, length).tolist()
    return ids


@pytest.mark.parametrize("name", GEOMETRIES)
def test_decode_and_chunks_are_prefill(checkpoints: Opener, name: str) -> None:
    found = checkpoints(name)
    model, local = golden.load(found, "fp32"), golden.LocalExperts(found, "fp32")
    ids = prompt(found, 33)
    with steady_sums():
        whole = golden.run_on(model, local, ids)
        steps = golden.run_on(model, local, ids[:20], ids[20:], [3, 8, 9])
    assert (steps.logits - whole.logits).abs().max() <= 1e-5
    assert whole.logits.std() > 0.5
    assert (whole.logits[0] - whole.logits[-1]).abs().max() > 0.5


@pytest.mark.parametrize("name", ["mini", "re-index"])
def test_pieces_of_the_work_do_not_show(checkpoints: Opener, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores and gathered keys are cut into pieces; small ones here, so that a short prompt meets all the seams."""
    found = checkpoints(name)
    model, local = golden.load(found, "fp32noaq"), golden.LocalExperts(found, "fp32noaq")
    ids = prompt(found, 61)
    with steady_sums():
        whole = golden.run_on(model, local, ids, ids[:3])
        monkeypatch.setattr(indexer, "SCORE_ELEMENTS", 7 * 8 * found.config.index_n_heads)
        monkeypatch.setattr(indexer, "_KEYS_AT_ONCE", 8)
        monkeypatch.setattr(sparse_attention, "GATHER_ELEMENTS", 3 * 20 * found.config.head_dim)
        pieces = golden.run_on(model, local, ids, ids[:3])
    assert (pieces.logits - whole.logits).abs().max() <= 1e-5
    for layer in found.config.index_source_layer_ids:
        assert torch.equal(pieces.prefill[f"layers.{layer}.index_topk"], whole.prefill[f"layers.{layer}.index_topk"])


def test_candidates_restrict_later_index_sources_only(checkpoints: Opener) -> None:
    found = checkpoints("re-index")
    config = found.config
    ids = prompt(found, 61)
    recorded = golden.run_on(golden.load(found, "fp32"), golden.LocalExperts(found, "fp32"), ids).prefill
    mask = recorded["layers.3.candidate_mask"]
    assert mask.shape == (61, 61)
    kept = mask.unflatten(1, (-1, 1))[:, :, 0]
    blocks = torch.nn.functional.pad(kept, (0, -61 % config.candidate_block_size)).unflatten(1, (-1, config.candidate_block_size))
    assert (blocks.any(2).sum(1) <= config.candidate_topk_blocks).all()
    for row in range(61):
        assert mask[row, row], "the block of the newest entry is always kept"
    inside = {layer: picked_inside(recorded[f"layers.{layer}.index_topk"], mask) for layer in (3, 4, 5)}
    assert inside[4].all()
    assert inside[5].all()
    assert not inside[3].all(), "the source itself chooses among all"
    picks = recorded["layers.3.index_topk"]
    assert picks.shape == (61, 4)
    for row in range(61):
        chosen = [p for p in picks[row].tolist() if p >= 0]
        assert chosen == sorted(chosen)
        assert len(chosen) == min(row + 1, 4)
        assert max(chosen) <= row


def picked_inside(picks: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[T, k] bool: whether a pick, if there is one, lies in the pool."""
    return (picks < 0) | mask.gather(1, picks.clamp(min=0))


def test_visibility_of_pairs(checkpoints: Opener) -> None:
    """Ratio 2: p = 0 sees no entry, 1 and 2 see one, 3 sees two."""
    found = checkpoints("mini")
    layer = found.config.compress_ratios.index(2)
    recorded = golden.run_on(golden.load(found, "fp32"), golden.LocalExperts(found, "fp32"), prompt(found, 7)).prefill
    picks = recorded[f"layers.{layer}.index_topk"]
    assert (picks >= 0).sum(1).tolist() == [0, 1, 1, 2, 2, 3, 3]
