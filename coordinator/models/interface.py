"""What the engine and a model family know of each other. A model sees routed experts as one callable and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

from evrun.expert_worker.wire.checkpoint.config import ModelConfig


class Experts(Protocol):
    """The routed experts of every layer."""

    def __call__(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Callable[[], Tensor]:
        """Submit x [T, D] dtype, ids [T, K] int32 best score first, weights [T, K] fp32, all on the model's device.

        The returned function waits for the routed sum [T, D] fp32 on the same device; it is called once.
        """
        ...


class Observer(Protocol):
    """Hooks into a forward call. Tensors are the model's own: copy what is kept, change nothing. Layers come in order."""

    def route(self, layer: int, ids: Tensor, weights: Tensor) -> None:
        """ids [T, K] int32, best score first; weights [T, K] fp32."""
        ...

    def moe(self, layer: int, moe_in: Tensor, routed_out: Tensor) -> None:
        """moe_in [T, D] dtype; routed_out [T, D] fp32, the shared expert not included."""
        ...


class DetailObserver:
    """An Observer that also sees what lies between the sublayers. Subclass it and override what is wanted."""

    def route(self, layer: int, ids: Tensor, weights: Tensor) -> None:
        """See Observer."""

    def moe(self, layer: int, moe_in: Tensor, routed_out: Tensor) -> None:
        """See Observer."""

    def tensor(self, layer: int, name: str, value: Tensor) -> None:
        """Everything else, by name:

        engram_out      [T, streams, D] dtype: after the Engram of this layer, where it has one
        attn_in         [T, D] dtype: after attn_norm
        attn_out        [T, D] dtype
        index_topk      [T, k] int64: entries chosen, ascending, then -1; index sources with at least one entry
        candidate_mask  [T, entries] bool: candidate source with at least one entry
        moe_shared_out  [T, D] dtype
        out             [T, streams, D] dtype: after the layer
        next_pre_mix    [T, streams] fp32: weights of the next collapse
        """


class Model(Protocol):
    """One family's text backbone, loaded."""

    config: ModelConfig

    def new_state(self, max_tokens: int) -> Any:
        """Decode state of one sequence of at most max_tokens tokens; `state.position` counts those seen."""
        ...

    def state_bytes(self, max_tokens: int) -> int:
        """Memory that such a state takes."""
        ...

    def forward(
        self,
        ids: Sequence[int] | Tensor,
        state: Any,
        experts: Experts,
        *,
        logits: Literal["last", "all"] = "last",
        observer: Observer | None = None,
    ) -> Tensor:
        """Advance `state` by T >= 1 tokens. T = 1 is a decode step; a prompt may be cut anywhere.

        Returns fp32 [1 or T, vocab_size]. After an exception the state is of no more use.
        Raises UsageError for ids outside the vocabulary or more tokens than the state holds, before anything changes.
        """
        ...
