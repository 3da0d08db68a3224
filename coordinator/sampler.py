"""Logits -> the next token."""

from __future__ import annotations

import torch


class Sampler:
    """Greedy at temperature 0 (lowest id among equals), else seeded sampling from softmax(logits / temperature).

    Sampling divides the probabilities by exponential noise and takes the largest (spec 3.10). The same seed gives the
    same tokens for the same logits.
    """

    def __init__(self, temperature: float, seed: int) -> None:
        self._temperature = temperature
        self._random = torch.Generator().manual_seed(seed & (2**63 - 1))

    def pick(self, logits: torch.Tensor) -> int:
        """logits [V] fp32 -> token id."""
        if self._temperature == 0:
            return int((logits == logits.max()).nonzero()[0, 0])
        probabilities = torch.softmax(logits.double().cpu() / self._temperature, -1)
        noise = torch.empty_like(probabilities).exponential_(generator=self._random)
        return int((probabilities / noise).argmax())


def best(logits: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """The `count` highest (id, logit), best first, lower id first among equals. logits [V] fp32."""
    values, ids = torch.sort(logits, descending=True, stable=True)
    return list(zip(ids[:count].tolist(), values[:count].tolist(), strict=True))
