"""Rotary embedding of adjacent channel pairs, with YaRN for the layers that read a compressed cache (spec 3.4)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from evrun.expert_worker.wire.checkpoint.config import ModelConfig, RopeScaling


def window_frequencies(config: ModelConfig) -> Tensor:
    """[R/2] fp32: the table of layers with ratio 0."""
    return _powers(config.rope_theta, config.qk_rope_head_dim)


def compressed_frequencies(config: ModelConfig) -> Tensor:
    """[R/2] fp32: the table of layers with ratio >= 1; YaRN at every length, no attention temperature."""
    width = config.qk_rope_head_dim
    scaling = config.rope_scaling
    low, high = yarn_range(config.compress_rope_theta, width, scaling)
    base = _powers(config.compress_rope_theta, width)
    kept = 1 - ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return base / scaling.factor * (1 - kept) + base * kept


def yarn_range(theta: float, width: int, scaling: RopeScaling) -> tuple[float, float]:
    """The pair indices between which the frequencies pass from unscaled to divided by `factor`."""

    def pair(beta: float) -> float:
        return width * math.log(scaling.original_max_position_embeddings / (beta * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(scaling.beta_fast)), 0)
    high = min(math.ceil(pair(scaling.beta_slow)), width - 1)
    return low, (high if high != low else low + 0.001)


def _powers(theta: float, width: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))


def rotation(positions: Tensor, frequencies: Tensor) -> Tensor:
    """positions [T] integers -> [T, R/2] complex64, e^(i angle); the inverse rotation is its conjugate."""
    angles = positions.float()[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rotate_(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate the last R channels of x [T, D] or [T, heads, D] in place, fp32 inside, rounded back to the dtype of x.

    turns: [T, R/2] complex64.
    """
    if x.dim() == 3:
        turns = turns[:, None]
    tail = x[..., -2 * turns.shape[-1] :]
    # A pair of channels is one complex number. Four separate products would round otherwise than the reference does.
    pairs = torch.view_as_complex(tail.float().contiguous().unflatten(-1, (-1, 2)))
    tail.copy_(torch.view_as_real(pairs * turns).flatten(-2))
    return x
