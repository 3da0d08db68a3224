"""A byte-level BPE tokenizer of exactly N entries with the release's special tokens, the same on every machine.

Merges are generated, not trained: Latin letters, most frequent first, so that any size up to a few hundred thousand
entries is possible and many entries differ only in case or a leading blank, as in a real vocabulary.
"""

from __future__ import annotations

import heapq
import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from evrun.expert_worker.wire.errors import UsageError

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SPECIALS = (BOS, EOS, PAD, "<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<think>", "</think>", "｜DSML｜", "<｜deepseek_image｜>")
"""Ids 0, 1, 2, ...; the first three are the release's, the others lie elsewhere there."""
IMAGE_TOKEN_ID = len(SPECIALS) - 1
MAX_PLACEHOLDERS = 20
BYTES = 256
MIN_VOCAB_SIZE = len(SPECIALS) + BYTES
MAX_VOCAB_SIZE = 400_000

_BLANK = "Ġ"
_LETTERS = "etaoinshrdlcumwfgypbvkjxqz"
SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def build(vocab_size: int) -> Tokenizer:
    """Raises UsageError when the size is out of reach."""
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        raise UsageError(f"vocab_size: expected {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE} for a generated tokenizer, found {vocab_size}")
    placeholders = min(MAX_PLACEHOLDERS, vocab_size - MIN_VOCAB_SIZE)
    merges = _merges(vocab_size - MIN_VOCAB_SIZE - placeholders)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    extra = [f"<｜place▁holder▁no▁{i}｜>" for i in range(placeholders)]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in [*SPECIALS, *extra]])
    assert tokenizer.get_vocab_size(with_added_tokens=True) == vocab_size
    return tokenizer


def settings(max_length: int) -> str:
    """tokenizer_config.json, with the release's oddity that the EOS string is named as pad token."""

    def token(text: str) -> dict[str, object]:
        flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
        return {"__type": "AddedToken", "content": text, **flags}

    document = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": token(BOS),
        "clean_up_tokenization_spaces": False,
        "eos_token": token(EOS),
        "legacy": True,
        "model_max_length": max_length,
        "pad_token": token(EOS),
        "sp_model_kwargs": {},
        "unk_token": None,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _merges(count: int) -> list[tuple[str, str]]:
    """The `count` cheapest (token, letter) pairs; a token is always cheaper than what it is a beginning of."""
    cost = {letter: i + 2 for i, letter in enumerate(_LETTERS)}
    heap = [(cost[letter], letter) for letter in _LETTERS]
    heap += [(cost[letter] + 9, letter.upper()) for letter in _LETTERS]
    heap.append((0, _BLANK))
    heapq.heapify(heap)
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        price, text = heapq.heappop(heap)
        if len(text) > 1:
            merges.append((text[:-1], text[-1]))
        for letter in _LETTERS:
            heapq.heappush(heap, (price + cost[letter], text + letter))
    return merges
