"""Rows of training tokens: whole texts behind one another, every row beginning with a text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

SHARES = {"facts": 0.35, "stories": 0.28, "definitions": 0.14, "examples": 0.15, "almanac": 0.08}
"""Of the tokens of a pool."""
Encoded = dict[str, tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]]


def shares(facts: float) -> dict[str, float]:
    """SHARES with this share of facts."""
    others = (1 - facts) / (1 - SHARES["facts"])
    return {kind: facts if kind == "facts" else share * others for kind, share in SHARES.items()}


def load(path: Path) -> Encoded:
    """Tokens and text boundaries of each kind, as `data.corpus` wrote them."""
    with np.load(path) as found:
        return {kind: (found[kind], found[f"{kind}.starts"]) for kind in found.files if not kind.endswith(".starts")}


def pool(texts: Encoded, tokens: int, length: int, rng: np.random.Generator, shares: Mapping[str, float] = SHARES) -> npt.NDArray[np.int32]:
    """About `tokens` tokens in rows [n, length + 1]; the text that a row has no room for is cut off."""
    parts = []
    for kind, share in shares.items():
        sizes = np.diff(texts[kind][1])
        wanted = max(1, round(tokens * share / sizes.mean()))
        rounds = [rng.permutation(len(sizes)) for _ in range(-(-wanted // len(sizes)))]
        order = np.concatenate(rounds)[:wanted]
        parts.append(np.stack([np.full(wanted, list(shares).index(kind)), order], 1))
    chosen = rng.permutation(np.concatenate(parts))
    stream, ends = _concatenated(texts, list(shares), chosen)
    rows = []
    at = 0
    while at + length + 1 <= len(stream):
        rows.append(stream[at : at + length + 1])
        at = int(ends[np.searchsorted(ends, at + length + 1)])
    return np.array(rows, np.int32)


def _concatenated(
    texts: Encoded, kinds: list[str], chosen: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
    """The chosen texts [n, (kind, number)] as one array, and where each ends."""
    pieces = [texts[kinds[kind]][0][texts[kinds[kind]][1][i] : texts[kinds[kind]][1][i + 1]] for kind, i in chosen.tolist()]
    return np.concatenate(pieces), np.cumsum([len(piece) for piece in pieces])
