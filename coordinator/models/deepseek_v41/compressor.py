"""The compressor of a KV source: attention input -> compressed entries and index keys (spec 3.6, 3.7)."""

from __future__ import annotations

import torch
from torch import Tensor

from evrun.coordinator.models.deepseek_v41.arithmetic import Arithmetic
from evrun.coordinator.models.deepseek_v41.indexer import IndexKeys
from evrun.coordinator.models.deepseek_v41.linear import Linear
from evrun.coordinator.models.deepseek_v41.norm import RmsNorm
from evrun.coordinator.models.deepseek_v41.rope import rotate_, rotation
from evrun.coordinator.models.deepseek_v41.state import SourceCache
from evrun.kernels.formats_torch import round_fp4_kv


class Compressor:
    """Pools each group of `ratio` tokens into one latent; groups lie at absolute positions, the last may stay open."""

    def __init__(self, wkv: Linear, wgate: Linear | None, norm: RmsNorm, ratio: int, arithmetic: Arithmetic) -> None:
        self._wkv = wkv
        self._wgate = wgate
        self._norm = norm
        self._ratio = ratio
        self._arithmetic = arithmetic

    def __call__(self, x: Tensor, cache: SourceCache, start: int) -> Tensor:
        """x [T, D] dtype of the tokens from `start` on -> latents [m, d] dtype of the groups they complete, m may be 0."""
        if self._wgate is None:
            return self._norm(self._wkv(x.float()))
        x = x.float()
        rows = torch.stack((self._wkv.product(x), self._wgate.product(x)), 1)
        waiting = start % self._ratio
        if waiting:
            rows = torch.cat((cache.open[:waiting], rows))
        groups, left = divmod(rows.shape[0], self._ratio)
        if left:
            cache.open[:left] = rows[groups * self._ratio :]
        k, g = rows[: groups * self._ratio].unflatten(0, (groups, self._ratio)).unbind(2)
        return self._norm(self._arithmetic.rounded((g.softmax(1) * k).sum(1)))


class KvSource:
    """Everything that only the owner of a compressed cache does."""

    def __init__(self, compressor: Compressor, index_keys: IndexKeys, frequencies: Tensor, ratio: int) -> None:
        self._compressor = compressor
        self._index_keys = index_keys
        self._frequencies = frequencies
        self._ratio = ratio

    def append(self, x: Tensor, cache: SourceCache, start: int) -> None:
        """Take in the attention input x [T, D] of the tokens from `start` on; rows of finished groups go into the cache."""
        latents = self._compressor(x, cache, start)
        count = latents.shape[0]
        if not count:
            return
        first = start // self._ratio
        positions = torch.arange(first, first + count, device=x.device) * self._ratio
        turns = rotation(positions, self._frequencies)
        # The index key comes from the latent before it is rotated and rounded.
        cache.keys[first : first + count] = self._index_keys(latents, turns)
        cache.entries[first : first + count] = round_fp4_kv(rotate_(latents, turns).float())
