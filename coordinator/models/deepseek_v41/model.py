"""The text backbone: embedding, layers, head (spec 3.0, 3.10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from evrun.coordinator.engram_hash import EngramHash
from evrun.coordinator.models.deepseek_v41.arithmetic import Arithmetic
from evrun.coordinator.models.deepseek_v41.hyper_connection import collapse
from evrun.coordinator.models.deepseek_v41.layer import Layer
from evrun.coordinator.models.deepseek_v41.linear import Weight, product
from evrun.coordinator.models.deepseek_v41.norm import RmsNorm
from evrun.coordinator.models.deepseek_v41.rope import compressed_frequencies, window_frequencies
from evrun.coordinator.models.deepseek_v41.state import State, state_bytes
from evrun.coordinator.models.deepseek_v41.step import Step
from evrun.coordinator.models.interface import Experts, Observer
from evrun.coordinator.weights import MappedTable
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.errors import UsageError


@dataclass(frozen=True)
class Parts:
    """What `load` put together from a checkpoint."""

    embed: MappedTable
    layers: tuple[Layer, ...]
    norm: RmsNorm
    head: Weight
    engram_hash: EngramHash | None


class DeepseekV41:
    """coordinator.models.interface.Model.

    Memory of a forward call beside weights and state: a few copies of the residual streams (T x streams x hidden x 4 bytes)
    and of the queries (T x heads x head_dim x 4); what would grow faster is done in pieces of 4 to 16 MiB (expanded weights,
    gathered keys, scores), and logits "all" takes T x vocabulary x 4 bytes. Measured at the release's widths and T = 512:
    0.22 GiB.
    """

    def __init__(self, config: ModelConfig, parts: Parts, arithmetic: Arithmetic, device: torch.device) -> None:
        self.config = config
        self.layers = parts.layers
        self._parts = parts
        self._arithmetic = arithmetic
        self._device = device
        self._window_frequencies = window_frequencies(config).to(device)
        self._compressed_frequencies = compressed_frequencies(config).to(device)

    def new_state(self, max_tokens: int) -> State:
        """Decode state of one sequence; its size is `state_bytes`."""
        return State(self.config, max_tokens, self._device)

    def state_bytes(self, max_tokens: int) -> int:
        return state_bytes(self.config, max_tokens)

    def forward(
        self,
        ids: Sequence[int] | Tensor,
        state: State,
        experts: Experts,
        *,
        logits: Literal["last", "all"] = "last",
        observer: Observer | None = None,
    ) -> Tensor:
        """See Model.forward."""
        tokens = self._checked(ids, state)
        with torch.inference_mode():
            step = self.begin(tokens, state, observer)
            streams, pre = self.embed(tokens)
            for layer in self.layers:
                streams, pre = layer(streams, pre, step, experts)
            self.finish(tokens, state)
            if logits == "last":
                streams, pre = streams[-1:], pre[-1:]
            x = self._parts.norm(collapse(streams, pre, self._arithmetic))
            result = product(x.float(), self._parts.head)
        # What leaves inference mode as it is could not be changed in place by its owner.
        return result.clone() if not torch.is_inference_mode_enabled() else result

    def begin(self, tokens: np.ndarray, state: State, observer: Observer | None) -> Step:
        """What the layers will share for the next tokens of a sequence."""
        rows = np.zeros((len(tokens), 0, 0), np.int64)
        if hashing := self._parts.engram_hash:
            history = state.tail
            rows = hashing.rows(np.concatenate([history, hashing.compress(tokens)]), len(history))
        frequencies = self._window_frequencies, self._compressed_frequencies
        return Step(state, len(tokens), self.config.sliding_window, *frequencies, rows, observer)

    def embed(self, tokens: np.ndarray) -> tuple[Tensor, Tensor]:
        """Streams [T, n, D] dtype: n copies of the embedding; and the first collapse [T, n]: stream 0 alone."""
        n = self.config.hc_mult
        rows = self._arithmetic.round(self._parts.embed.gather(tokens).to(self._device))
        pre = torch.zeros(len(tokens), n, dtype=torch.float32, device=self._device)
        pre[:, 0] = 1
        return rows[:, None].expand(-1, n, -1), pre

    def finish(self, tokens: np.ndarray, state: State) -> None:
        """Count the tokens as seen."""
        state.position += len(tokens)
        if hashing := self._parts.engram_hash:
            state.tail = np.concatenate([state.tail, hashing.compress(tokens)])[-hashing.look_back :]

    def _checked(self, ids: Sequence[int] | Tensor, state: State) -> np.ndarray:
        tokens = np.asarray(ids.cpu() if isinstance(ids, Tensor) else ids, np.int64).reshape(-1)
        if not len(tokens):
            raise UsageError("forward: at least one token expected, found none")
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            outside = tokens[(tokens < 0) | (tokens >= self.config.vocab_size)][0]
            raise UsageError(f"token ids: 0 to {self.config.vocab_size - 1} expected (the vocabulary), found {outside}")
        if state.position + len(tokens) > state.max_tokens:
            raise UsageError(f"context: the state holds {state.max_tokens} tokens, {state.position} seen + {len(tokens)} new are more")
        return tokens
