"""Engram's row numbers against the published constants and worked values of the release, and against the golden data."""

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from evrun.coordinator.engram_hash import EngramHash, moduli, multipliers, raw_moduli
from evrun.coordinator.engram_map import token_map
from evrun.expert_worker.wire.checkpoint.config import ModelConfig, load_config
from evrun.expert_worker.wire.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPTS = [(p.parents[2].name, p.parent.name, p.stem) for p in sorted(GOLDEN.glob("*/expected/*/*.safetensors")) if "layers" not in p.name]
WITH_ENGRAM = [p for p in PROMPTS if p[0] != "minimal"]


def release() -> ModelConfig:
    """The Engram values of the release on an otherwise tiny geometry."""
    return dataclasses.replace(
        load_config(GOLDEN / "full/checkpoint"),
        num_hidden_layers=15,
        engram_layer_ids=(1, 14),
        engram_num_embeddings=(384006168, 384016682),
        engram_max_ngram_size=4,
        engram_vocab_size=16_000_000,
        engram_n_heads=8,
        engram_head_dim=256,
        engram_compressed_vocab_size=99092,
    )


def test_multipliers_of_the_release() -> None:
    assert multipliers(release()).tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]


def test_moduli_of_the_release() -> None:
    layer_1 = (
        "057 079 081 097 121 129 133 183 189 207 211 253 277 289 307 321 339 381 393 399 403 409 447 463",
        "477 487 499 507 511 573 609 627 667 669 693 697 711 729 759 769 781 799 813 819 841 877 879 889",
    )
    assert [m.tolist() for m in moduli(release())] == [[16_000_000 + int(n) for n in line.split()] for line in layer_1]


def test_worked_values_of_the_release() -> None:
    """Tokens [0, 3], whose compressed ids are 0 and 3; the padding token's is 2."""
    hashing = EngramHash(release(), np.arange(512, dtype=np.int32))
    rows = hashing.rows(hashing.compress([0, 3]), 0)
    assert rows.shape == (2, 2, 24)
    assert rows[1, 0, [0, 8, 16]].tolist() == [13136173, 143666100, 270063682]
    assert rows[0, :, 0].tolist() == [5702652, 14361964]
    assert rows[1, 1, 0] == 7976312
    digest = hashlib.sha256(rows[None].astype("<i8").tobytes()).hexdigest()
    assert digest == "f5a64799492bea90bc6d87f0cb8a67bb983441e1cd9c12ec2e7b8df6cbcfee1d"


def hashing_of(name: str) -> EngramHash:
    config = load_config(GOLDEN / name / "checkpoint")
    return EngramHash(config, token_map(GOLDEN / name / "checkpoint/tokenizer.json", config.vocab_size))


@pytest.mark.parametrize(("name", "variant", "prompt"), WITH_ENGRAM)
def test_golden_rows(name: str, variant: str, prompt: str) -> None:
    expected = load_file(GOLDEN / name / "expected" / variant / f"{prompt}.safetensors")
    hashing = hashing_of(name)
    assert np.array_equal(hashing.rows(hashing.compress(expected["token_ids"]), 0), expected["engram_hash_ids"])


@given(st.lists(st.integers(0, 511), min_size=1, max_size=20), st.data())
def test_pieces_equal_the_whole(tokens: list[int], data: st.DataObject) -> None:
    hashing = HASHING
    ids = hashing.compress(tokens)
    whole = hashing.rows(ids, 0)
    start, found = 0, []
    while start < len(ids):
        end = data.draw(st.integers(start + 1, len(ids)))
        history = data.draw(st.integers(min(start, hashing.look_back), start))
        found.append(hashing.rows(ids[start - history : end], history))
        start = end
    assert np.array_equal(np.concatenate(found), whole)


HASHING = hashing_of("full")


@given(
    st.integers(2, 5000),
    st.integers(2, 6),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_moduli_are_distinct_primes_and_ascend_within_an_order(rows: int, order: int, heads: int, layers: int) -> None:
    found = raw_moduli(rows, order, heads, layers)
    flat = [int(n) for m in found for n in m]
    assert len(found) == layers
    assert len(set(flat)) == len(flat) == layers * heads * (order - 1)
    assert all(n >= rows and all(n % d for d in range(2, int(n**0.5) + 1)) for n in flat)
    assert all((np.diff(m.reshape(order - 1, heads), axis=1) > 0).all() for m in found)


def test_rows_stay_inside_the_tables() -> None:
    config = load_config(GOLDEN / "long/checkpoint")
    ids = np.random.default_rng(0).integers(0, config.engram_compressed_vocab_size, 3000)
    rows = hashing_of("long").rows(ids, 0)
    assert rows.min() >= 0
    for layer, size in enumerate(config.engram_num_embeddings):
        assert rows[:, layer].max() < size
        assert np.unique(rows[:, layer]).size > size // 2  # spread, not clumped


def test_tables_of_another_size_are_refused() -> None:
    config = dataclasses.replace(release(), engram_num_embeddings=(384006168, 384016683))
    with pytest.raises(CheckpointError, match=r"layer 14: expected 384016682 .* found 384016683"):
        EngramHash(config, np.arange(512, dtype=np.int32))
