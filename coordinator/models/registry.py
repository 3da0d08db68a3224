"""Model families by name. A family is imported when it is asked for, never before."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from evrun.coordinator.models.interface import Model
from evrun.expert_worker.wire.checkpoint.layouts import MODEL_TYPE
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.errors import UsageError

_MODULES = {"deepseek_v41": "evrun.coordinator.models.deepseek_v41.load"}
"""Architecture (the config's model_type) -> module with `load_model`."""

__all__ = ["Model", "load_model", "names"]


def names() -> list[str]:
    return list(_MODULES)


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: str,
    numerics: str,
    dense_dtype: str,
    device: str,
    token_map: npt.NDArray[np.int32] | None,
    progress: Callable[[int, str], None],
    architecture: str = MODEL_TYPE,
) -> Model:
    """Load the dense tree of a checkpoint.

    dtype        `bfloat16` rounds between operations as the reference does, `float32` not at all
    numerics     `reference` rounds the inputs of quantised linears to E4M3, `weights-only` does not
    dense_dtype  how dense fp8 weights are held: `fp8` as stored, `bfloat16` expanded once; equal results
    device       as torch names it
    token_map    int32 [vocab_size], the Engram's compressed ids; None only for a checkpoint without Engram
    progress     (bytes done since the last call, what)
    Raises UsageError for an unknown name, PayloadError for a damaged tensor, CheckpointError.
    """
    if architecture not in _MODULES:
        raise UsageError(f"model architecture {architecture!r}: unknown; known: {', '.join(_MODULES)}")
    family = importlib.import_module(_MODULES[architecture])
    model: Model = family.load_model(
        checkpoint, dtype=dtype, numerics=numerics, dense_dtype=dense_dtype, device=device, token_map=token_map, progress=progress
    )
    return model
