"""`coordinator.engram_hash` for many sequences at once, on the device of the tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from evrun.coordinator.engram_hash import moduli, multipliers
from evrun.expert_worker.wire.checkpoint.config import ModelConfig


class EngramRows:
    """Table rows of every token of sequences that begin at position 0."""

    def __init__(self, config: ModelConfig, token_map: npt.NDArray[np.int32]) -> None:
        self._map = torch.from_numpy(token_map.astype(np.int64))
        self._pad = int(token_map[config.engram_pad_token_id])
        self._multipliers = multipliers(config).tolist()
        primes = [row.reshape(config.engram_max_ngram_size - 1, config.engram_n_heads) for row in moduli(config)]
        self._moduli = [torch.from_numpy(row) for row in primes]
        self._offsets = [torch.from_numpy((row.cumsum() - row.ravel()).reshape(row.shape)) for row in primes]

    def __call__(self, tokens: Tensor) -> list[Tensor]:
        """[B, S] int64 -> per Engram layer [B, S, columns] int64."""
        device = tokens.device
        ids = self._map.to(device)[tokens]
        found = []
        for factors, primes, offsets in zip(self._multipliers, self._moduli, self._offsets, strict=True):
            mixed = ids * factors[0]
            columns = []
            for order, factor in enumerate(factors[1:]):
                before = torch.full_like(ids, self._pad)
                before[:, order + 1 :] = ids[:, : ids.shape[1] - order - 1]
                mixed = mixed ^ (before * factor)
                columns.append(offsets[order].to(device) + mixed[..., None] % primes[order].to(device))
            found.append(torch.cat(columns, -1))
        return found
