"""Choosing the best of many scores: higher score first, then lower position. Exact, whatever the order of the work."""

from __future__ import annotations

import torch
from torch import Tensor

ABSENT = -(1 << 63)
"""Rank of what must not be chosen."""
_POSITIONS = 1 << 32


def rank(scores: Tensor, positions: Tensor, valid: Tensor) -> Tensor:
    """int64 ranks, larger is better, no two alike: the bits of the score in front of the reversed position.

    scores fp32, positions int64 below 2^31, valid bool; all of one shape (or broadcast).
    """
    # Adding 0 turns -0.0 into 0.0, which ties with it.
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return torch.where(valid, ordered * _POSITIONS + (_POSITIONS - 1 - positions), ABSENT)


def merge(best: Tensor | None, more: Tensor, count: int) -> Tensor:
    """The `count` largest ranks of both, in no order: [..., min(count, how many there are)]."""
    both = more if best is None else torch.cat((best, more), -1)
    return both if both.shape[-1] <= count else both.topk(count, sorted=False).values


def chosen_positions(best: Tensor, count: int) -> Tensor:
    """Ranks [..., n] -> positions [..., count] ascending, then -1 where there are fewer."""
    positions = torch.where(best == ABSENT, _POSITIONS, _POSITIONS - 1 - best.remainder(_POSITIONS)).sort(-1).values
    positions = torch.where(positions == _POSITIONS, -1, positions)
    return torch.nn.functional.pad(positions, (0, count - positions.shape[-1]), value=-1)
