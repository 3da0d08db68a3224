"""The compressed token map: which raw ids count as the same text, and the cache it is kept in."""

import json
import logging
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from evrun.coordinator.engram_map import cached_token_map, distinct, token_map
from evrun.expert_worker.wire.checkpoint.config import load_config
from evrun.expert_worker.wire.errors import CheckpointError

CHECKPOINT = Path(__file__).parents[1] / "golden/full/checkpoint"


@pytest.fixture
def config():
    return load_config(CHECKPOINT)


@pytest.mark.parametrize("name", ["minimal", "full", "long"])
def test_golden_tokenizers_have_as_many_values_as_their_config_says(name: str) -> None:
    directory = CHECKPOINT.parents[1] / name / "checkpoint"
    config = load_config(directory)
    found = token_map(directory / "tokenizer.json", config.vocab_size)
    assert found.dtype == np.int32
    assert found.shape == (config.vocab_size,)
    assert distinct(found) == config.engram_compressed_vocab_size
    assert found[[0, 2, 3]].tolist() == [0, 2, 3]
    first_seen = np.unique(found, return_index=True)[1]
    assert (np.diff(first_seen) > 0).all()  # numbers in order of first appearance


def tokenizer_of(folder: Path, *tokens: str) -> Path:
    """A tokenizer of these byte-level tokens."""
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_what_counts_as_the_same_text(tmp_path: Path) -> None:
    same = (
        ("the", "The", "THE", "Ġthe", "ĠĠThe", "theĊ"),  # case, blanks around
        ("Ã©", "e", "Ã‰"[0] + "ī"),  # é, e, É: accents
        ("Ġ", "ĠĠ", "ĊĊ", "ĉ"),  # blanks alone are one blank
        ("aĠb", "aĠĠb", "aĊb"),  # runs of blanks inside
        ("ï¬ģ", "fi"),  # the ligature fi
    )
    tokens = [t for group in same for t in group]
    found = token_map(tokenizer_of(tmp_path, *tokens), len(tokens)).tolist()
    assert found == [i for i, group in enumerate(same) for _ in group]


def test_broken_characters_are_told_apart_by_their_token(tmp_path: Path) -> None:
    tokens = ["Ã", "Â", "a", "A"]  # two lone lead bytes, both decoded to U+FFFD
    assert token_map(tokenizer_of(tmp_path, *tokens), 4).tolist() == [0, 1, 2, 2]


def test_ids_without_a_token_share_one_number(tmp_path: Path) -> None:
    assert token_map(tokenizer_of(tmp_path, "a", "b"), 4).tolist() == [0, 1, 2, 2]


def test_tokenizer_with_ids_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected ids below vocab_size 2, found 2"):
        token_map(tokenizer_of(tmp_path, "a", "b", "c"), 2)


@pytest.mark.parametrize("text", ["", "{}", "\x00"])
def test_no_tokenizer(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        token_map(tmp_path / "tokenizer.json", 3)


def test_cache_is_used(tmp_path: Path, config, monkeypatch: pytest.MonkeyPatch) -> None:
    found = cached_token_map(CHECKPOINT, config, tmp_path / "deep" / "cache")
    (kept,) = (tmp_path / "deep" / "cache").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600

    def never(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr("evrun.coordinator.engram_map.token_map", never)
    assert np.array_equal(cached_token_map(CHECKPOINT, config, tmp_path / "deep" / "cache"), found)


@pytest.mark.parametrize("damage", ["empty", "cut", "other", "pickle"])
def test_damaged_cache_is_computed_again(tmp_path: Path, config, damage: str) -> None:
    found = cached_token_map(CHECKPOINT, config, tmp_path)
    (kept,) = tmp_path.iterdir()
    if damage == "empty":
        kept.write_bytes(b"")
    elif damage == "cut":
        kept.write_bytes(kept.read_bytes()[:-50])
    elif damage == "other":
        np.save(kept, np.zeros(512, np.int32))
    else:
        np.save(kept, np.array([{}], object), allow_pickle=True)
    assert np.array_equal(cached_token_map(CHECKPOINT, config, tmp_path), found)
    assert np.array_equal(np.load(kept), found)


def test_unwritable_cache_is_a_warning(tmp_path: Path, config, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        found = cached_token_map(CHECKPOINT, config, tmp_path / "file")
    assert distinct(found) == config.engram_compressed_vocab_size
    assert "not kept" in caplog.text


def test_full_disk_leaves_no_half_cache(tmp_path: Path, config, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_, **__):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("evrun.coordinator.engram_map.np.save", full)
    cached_token_map(CHECKPOINT, config, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert "No space left" in caplog.text


def test_tokenizer_of_another_model_is_refused(tmp_path: Path, config) -> None:
    text = (CHECKPOINT / "tokenizer.json").read_text()
    document = json.loads(text)
    vocab = document["model"]["vocab"]
    vocab["ĠĠzz"] = vocab.pop(next(t for t in reversed(vocab) if len(t) > 3))
    document["model"]["merges"] = []
    vocab["zz"] = vocab.pop(next(t for t in reversed(vocab) if len(t) == 3))
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError) as caught:
        cached_token_map(tmp_path, config, tmp_path / "cache")
    assert caught.value.exit_code == 3
    (line,) = caught.value.problems
    assert line.startswith(f"{tmp_path / 'tokenizer.json'}: expected engram_compressed_vocab_size 420 distinct normalised tokens, found ")
    assert not (tmp_path / "cache").exists()
