"""The compressed token map of Engram: raw token id -> id of its normalised text (spec 3.8).

It depends on nothing but the checkpoint's own tokenizer, takes seconds for a full vocabulary and is kept in a cache.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, normalizers

from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.shards import TOKENIZER_FILE
from evrun.expert_worker.wire.errors import CheckpointError

I32 = npt.NDArray[np.int32]

log = logging.getLogger(__name__)

VERSION = 1
"""Part of the cache key: counts up when `token_map` would give other numbers."""

REPLACEMENT = "\ufffd"
_LONE_SPACE = "\ue000"
_BATCH = 4096


def token_map(tokenizer_json: Path, vocab_size: int) -> I32:
    """int32 [vocab_size]: compressed id of every raw id, in order of first appearance.

    Raises CheckpointError when the file is no tokenizer or has ids beyond the vocabulary.
    """
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(str(tokenizer_json.parent), [f"{tokenizer_json}: cannot be read ({error.strerror})"]) from error
    except Exception as error:  # the library raises bare Exception
        problem = f"{tokenizer_json}: not a tokenizer ({str(error)[:120]!a}); copy the file again"
        raise CheckpointError(str(tokenizer_json.parent), [problem]) from error
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        problem = f"{tokenizer_json}: expected ids below vocab_size {vocab_size}, found {largest}; is it another model's tokenizer?"
        raise CheckpointError(str(tokenizer_json.parent), [problem])
    normalise = _normaliser().normalize_str
    numbers: dict[str, int] = {}
    out = np.empty(vocab_size, np.int32)
    for start in range(0, vocab_size, _BATCH):
        ids = range(start, min(start + _BATCH, vocab_size))
        for raw, text in zip(ids, tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False), strict=True):
            key = (tokenizer.id_to_token(raw) or "") if REPLACEMENT in text else normalise(text) or text
            out[raw] = numbers.setdefault(key, len(numbers))
    return out


def cached_token_map(directory: str | Path, config: ModelConfig, cache_dir: str | Path) -> I32:
    """The map of a checkpoint's tokenizer, from the cache where it is there and right.

    A cache that cannot be written is a warning. Raises CheckpointError when the map has not exactly
    `engram_compressed_vocab_size` distinct values: every Engram row would be wrong and the text still fluent.
    """
    path = Path(directory) / TOKENIZER_FILE
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise CheckpointError(str(directory), [f"{path}: cannot be read ({error.strerror})"]) from error
    cache = Path(cache_dir) / f"engram-map-v{VERSION}-{config.vocab_size}-{digest}.npy"
    kept = _load(cache, config)
    if kept is not None:
        return kept
    found = token_map(path, config.vocab_size)
    size = distinct(found)
    if size != config.engram_compressed_vocab_size:
        expected = f"engram_compressed_vocab_size {config.engram_compressed_vocab_size}"
        problem = f"{path}: expected {expected} distinct normalised tokens, found {size}; tokenizer and config do not belong together"
        raise CheckpointError(str(directory), [problem])
    _store(cache, found)
    return found


def _normaliser() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"\A \z"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def distinct(values: I32) -> int:
    """How many different values a map has: `engram_compressed_vocab_size` when it is right."""
    return int(np.unique(values).size)


def _load(cache: Path, config: ModelConfig) -> I32 | None:
    """A kept map of the right form, else None; a damaged file is no error."""
    try:
        with cache.open("rb") as file:
            kept = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    right = isinstance(kept, np.ndarray) and kept.dtype == np.int32 and kept.shape == (config.vocab_size,)
    return kept if right and distinct(kept) == config.engram_compressed_vocab_size else None


def _store(cache: Path, values: I32) -> None:
    """Whole or not at all, readable by the owner only."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=cache.parent, prefix=".engram-map-")
        try:
            with os.fdopen(fd, "wb") as file:
                np.save(file, values, allow_pickle=False)
            os.replace(name, cache)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        log.warning("engram token map not kept: %s: %s; it is computed again at the next start", cache, error.strerror)
