"""Logits -> the next token."""

from __future__ import annotations

import torch


class Sampler:
    """Greedy at temperature 0 (lowest id among equals), else seeded sampling from softmax(logits / temperature).

    With top_p below 1 only the likeliest tokens whose probabilities reach that sum take part, at least one.
    Sampling divides the probabilities by exponential noise and takes the largest (spec 3.10). The same seed gives the
    same tokens for the same logits.
    """

    def __init__(self, temperature: float, seed: int, top_p: float = 1.0) -> None:
        self._temperature, self._top_p = temperature, top_p
        self._random = torch.Generator().manual_seed(seed & (2**63 - 1))

    def pick(self, logits: torch.Tensor) -> int:
        """logits [V] fp32 -> token id."""
        if self._temperature == 0:
            return int((logits == logits.max()).nonzero()[0, 0])
        probabilities = torch.softmax(logits.double().cpu() / self._temperature, -1)
        if self._top_p < 1:
            probabilities = nucleus(probabilities, self._top_p)
        noise = torch.empty_like(probabilities).exponential_(generator=self._random)
        return int((probabilities / noise).argmax())


def nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """[V] with 0 for each token before which the likelier ones reach `top_p` already."""
    values, ids = torch.sort(probabilities, descending=True, stable=True)
    values[torch.cumsum(values, 0) - values >= top_p] = 0
    kept = torch.zeros_like(probabilities)
    kept[ids] = values
    return kept


def log_probabilities(logits: torch.Tensor, token: int, count: int) -> list[tuple[int, float]]:
    """(id, log probability) of `token`, then of the `count` best. logits [V] fp32; the temperature plays no part."""
    logprobs = torch.log_softmax(logits.double().cpu(), -1)
    return [(token, float(logprobs[token])), *best(logprobs, count)]


def best(logits: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """The `count` highest (id, logit), best first, lower id first among equals. logits [V] fp32."""
    values, ids = torch.sort(logits, descending=True, stable=True)
    return list(zip(ids[:count].tolist(), values[:count].tolist(), strict=True))
