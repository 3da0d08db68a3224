"""Which table rows Engram looks up for a token: a hash of the last few compressed ids (spec 3.8). Pure integers."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.errors import CheckpointError

I64 = npt.NDArray[np.int64]

SEED_STEP = 10007
"""The generator of a layer's multipliers is seeded with this times the layer id."""


def multipliers(config: ModelConfig) -> I64:
    """int64 [engram layers, engram_max_ngram_size]: odd factors, the first for the token itself, then one per step back."""
    bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    draws = [
        np.random.default_rng(SEED_STEP * layer).integers(0, bound, size=config.engram_max_ngram_size, dtype=np.int64)
        for layer in config.engram_layer_ids
    ]
    return np.array(draws, np.int64).reshape(-1, config.engram_max_ngram_size) * 2 + 1


def moduli(config: ModelConfig) -> list[I64]:
    """Per Engram layer int64 [columns]: one prime per n-gram order and head, used nowhere else; order-major.

    Raises CheckpointError when a layer's primes do not add up to its `engram_num_embeddings`.
    """
    found = raw_moduli(config.engram_vocab_size, config.engram_max_ngram_size, config.engram_n_heads, len(config.engram_layer_ids))
    problems = [
        f"engram_num_embeddings of layer {layer}: expected {int(primes.sum())} (sum of the hash moduli of this geometry), found {rows}; "
        "engram_vocab_size, engram_n_heads or engram_max_ngram_size is not that of the tables"
        for layer, primes, rows in zip(config.engram_layer_ids, found, config.engram_num_embeddings, strict=True)
        if int(primes.sum()) != rows
    ]
    if problems:
        raise CheckpointError("config", problems)
    return found


def raw_moduli(engram_vocab_size: int, max_ngram_size: int, num_heads: int, num_layers: int) -> list[I64]:
    """The primes alone: for every layer and order, from engram_vocab_size upwards, each the next one not used before."""
    used: set[int] = set()
    layers = []
    for _ in range(num_layers):
        primes = []
        for _order in range(2, max_ngram_size + 1):
            candidates = (n for n in itertools.count(engram_vocab_size) if n not in used and _is_prime(n))
            chosen = list(itertools.islice(candidates, num_heads))
            used.update(chosen)
            primes += chosen
        layers.append(np.array(primes, np.int64))
    return layers


class EngramHash:
    """The hash of one checkpoint. Raises CheckpointError when config and tables contradict each other."""

    def __init__(self, config: ModelConfig, token_map: npt.NDArray[np.int32]) -> None:
        """token_map: int32 [vocab_size] as `engram_map.cached_token_map` gives it."""
        self._map = token_map.astype(np.int64)
        self._pad = int(self._map[config.engram_pad_token_id])
        self._multipliers = multipliers(config)
        per_layer = moduli(config)
        self._moduli = np.array(per_layer, np.int64).reshape(len(per_layer), config.engram_max_ngram_size - 1, config.engram_n_heads)
        flat = self._moduli.reshape(len(per_layer), -1)
        self._offsets = (np.cumsum(flat, axis=1) - flat).reshape(self._moduli.shape)
        self.look_back = config.engram_max_ngram_size - 1
        """How many compressed ids before a token its rows depend on: what a decode state has to keep."""

    def compress(self, tokens: npt.ArrayLike) -> I64:
        """int64 [n]: compressed ids of raw token ids, the form in which `rows` takes them."""
        found: I64 = self._map[np.asarray(tokens, np.int64)]
        return found

    def rows(self, ids: I64, history: int) -> I64:
        """Table rows of every token after the first `history` of `ids`.

        ids      [history + T] int64   compressed ids; the first `history` belong to tokens before, in order
        history  0..look_back; fewer than look_back means that the sequence begins there: the rest counts as padding
        returns  [T, engram layers, columns] int64, column (n - 2) * engram_n_heads + head
        """
        missing = max(0, self.look_back - history)
        padded = np.concatenate([np.full(missing, self._pad, np.int64), ids])
        tokens = len(ids) - history
        first = len(padded) - tokens
        out = np.empty((tokens, *self._moduli.shape), np.int64)
        for layer, factors in enumerate(self._multipliers):
            mixed = padded[first:] * factors[0]
            for step in range(1, self.look_back + 1):
                mixed = mixed ^ (padded[first - step : len(padded) - step] * factors[step])
                order = step - 1
                out[:, layer, order] = self._offsets[layer, order] + mixed[:, None] % self._moduli[layer, order]
        return out.reshape(tokens, len(self._multipliers), -1)


_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def _is_prime(n: int) -> bool:
    """Miller-Rabin; these witnesses decide every n below 3.3e24."""
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in _WITNESSES:
        x = pow(base, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True
