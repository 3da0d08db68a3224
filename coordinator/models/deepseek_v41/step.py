"""What the layers of one forward call share: positions, rotations, window slots, and what index sources publish."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from evrun.coordinator.models.deepseek_v41.indexer import Selection
from evrun.coordinator.models.deepseek_v41.rope import rotation
from evrun.coordinator.models.deepseek_v41.state import State
from evrun.coordinator.models.interface import DetailObserver, Observer


class Step:
    """T tokens at positions start .. start + T - 1 of one sequence. Nothing here outlives the call."""

    def __init__(
        self,
        state: State,
        tokens: int,
        window: int,
        window_frequencies: Tensor,
        compressed_frequencies: Tensor,
        engram_rows: npt.NDArray[np.int64],
        observer: Observer | None,
    ) -> None:
        self.state = state
        self.start = state.position
        self.tokens = tokens
        self.observer = observer
        self.details = observer if isinstance(observer, DetailObserver) else None
        self.engram_rows = engram_rows
        """[T, Engram layers, columns]"""
        device = window_frequencies.device
        self.positions = torch.arange(self.start, self.start + tokens, device=device)
        self.window_turns = rotation(self.positions, window_frequencies)
        self.compressed_turns = rotation(self.positions, compressed_frequencies)
        self.before_slots = torch.arange(self.start - window + 1, self.start, device=device) % window
        """[W - 1] window slots of the positions before this call, oldest first"""
        self.kept = min(tokens, window)
        """newest tokens of this call that the window keeps"""
        self.kept_slots = self.positions[tokens - self.kept :] % window
        slots = window if self.start else min(window, tokens)
        seen = (self.positions[:, None] - (window - 1)).clamp(min=0) + torch.arange(slots, device=device)
        self.in_window = seen <= self.positions[:, None]
        """[T, W or less] which slots of a query's window count: positions in order, then those that it does not have yet"""
        self.window_rows = seen.sub_(self.start - window + 1).clamp_(max=window - 2 + tokens)
        """the same shape: row of a slot among the W - 1 positions before the call and its T tokens"""
        self.selection: Selection | None = None
        """of the newest index source so far"""
        self.candidate_blocks: Tensor | None = None
        """of the candidate source, once it has run and when it leaves anything out"""

    def visible(self, ratio: int) -> Tensor:
        """[T] entries of a cache of this ratio that each query may see."""
        return (self.positions + 1).div(ratio, rounding_mode="floor")

    def entries(self, ratio: int) -> int:
        """Entries of a cache of this ratio after this call: what the last query sees."""
        return (self.start + self.tokens) // ratio
