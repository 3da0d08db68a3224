"""Rotary embedding of adjacent channel pairs, with YaRN for the layers that read a compressed cache (spec 3.4)."""

from __future__ import annotations

import math
from typing import NamedTuple

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


class Rotation(NamedTuple):
    """cos and sin of the angles of some positions, each [T, R/2] fp32."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, frequencies: Tensor) -> Rotation:
        """positions [T] integers."""
        angles = positions.float()[:, None] * frequencies
        return cls(angles.cos(), angles.sin())

    def inverse(self) -> Rotation:
        return Rotation(self.cos, -self.sin)


def rotate_(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the last R channels of x [T, D] or [T, heads, D] in place, fp32 inside, rounded back to the dtype of x."""
    cos, sin = rotation
    tail = x[..., -2 * cos.shape[-1] :]
    pairs = tail.float().unflatten(-1, (-1, 2))
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    first, second = pairs[..., 0], pairs[..., 1]
    tail.copy_(torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2))
    return x
