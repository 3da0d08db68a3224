"""Weights in the release's formats: fake quantisation for training, and the codes and scales that give the same values.

Everything that is packed goes through the same scale as its fake quantisation, so the packed weights are what was trained.
Gradients pass straight through: a quantised value has the gradient of the value it stands for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from evrun.kernels.formats import E2M1_MAX, E4M3_MAX, FP4_WEIGHT_GROUP, FP8_BLOCK, float32_to_e2m1, pack_e2m1
from evrun.kernels.formats_torch import power_of_two_ceil

_SMALLEST = 2.0**-60
"""Least maximum of a group that a scale is made for: an untouched group of zeros keeps a scale far from both ends."""


class Packed(NamedTuple):
    """A weight as stored."""

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]
    """E8M0"""


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight(x: Tensor, value: Tensor) -> Tensor:
    """`value`, with the gradient of x. Both of one shape and dtype."""
    result: Tensor = _Straight.apply(x, value)  # type: ignore[no-untyped-call]
    return result


def as_bfloat16(w: Tensor) -> Tensor:
    """fp32 values that bfloat16 holds."""
    return straight(w, w.detach().bfloat16().float())


def as_fp4(w: Tensor) -> Tensor:
    """Routed experts: w [..., K] fp32, E2M1 with one E8M0 scale per 32 columns."""
    return straight(w, _fp4(w.detach())[0].flatten(-2))


def as_fp8_tiles(w: Tensor) -> Tensor:
    """Dense weights: w [N, K] fp32, E4M3 with one E8M0 scale per 32 x 32 tile."""
    return straight(w, _untile(_fp8(_tile(w.detach()))[0], w.shape))


def as_fp8_rows(w: Tensor) -> Tensor:
    """Engram rows: w [..., K] fp32, E4M3 with one E8M0 scale per 32 columns of a row."""
    return straight(w, _fp8(w.detach().unflatten(-1, (-1, FP8_BLOCK)))[0].flatten(-2))


def pack_fp4(w: Tensor) -> Packed:
    """The bytes of `as_fp4`: codes [..., K/2], scales [..., K/32]."""
    values, scale = _fp4(w.detach())
    codes = float32_to_e2m1((values / scale).flatten(-2).cpu().numpy())
    return Packed(pack_e2m1(codes), _e8m0(scale[..., 0]))


def pack_fp8_tiles(w: Tensor) -> Packed:
    """The bytes of `as_fp8_tiles`: codes [N, K], scales [N/32, K/32]."""
    values, scale = _fp8(_tile(w.detach()))
    codes = _untile((values / scale).to(torch.float8_e4m3fn).view(torch.uint8), w.shape)
    return Packed(codes.cpu().numpy(), _e8m0(scale[..., 0]))


def pack_fp8_rows(w: Tensor) -> Packed:
    """The bytes of `as_fp8_rows`: codes [..., K], scales [..., K/32]."""
    values, scale = _fp8(w.detach().unflatten(-1, (-1, FP8_BLOCK)))
    return Packed((values / scale).to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2).cpu().numpy(), _e8m0(scale[..., 0]))


def _fp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Values [..., K/32, 32] and scales [..., K/32, 1]. Of the scale that clips nothing and its half the better one is taken."""
    groups = w.unflatten(-1, (-1, FP4_WEIGHT_GROUP))
    whole = power_of_two_ceil((groups.abs().amax(-1, keepdim=True) / E2M1_MAX).clamp_(min=_SMALLEST))
    half = whole / 2
    value, clipped = _e2m1(groups / whole) * whole, _e2m1(groups / half) * half
    better = (clipped - groups).square().sum(-1, keepdim=True) < (value - groups).square().sum(-1, keepdim=True)
    return torch.where(better, clipped, value), torch.where(better, half, whole)


def _e2m1(v: Tensor) -> Tensor:
    """Nearest E2M1 value, ties to the even code."""
    magnitude = v.abs().clamp(max=E2M1_MAX)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return ((magnitude / step).round() * step).copysign(v)


def _fp8(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Values of the shape of `groups` [..., n] and scales [..., 1]."""
    scale = power_of_two_ceil((groups.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp_(min=_SMALLEST))
    return (groups / scale).to(torch.float8_e4m3fn).float() * scale, scale


def _tile(w: Tensor) -> Tensor:
    """[N, K] -> [N/32, K/32, 1024]."""
    rows, columns = w.shape
    tiles = w.view(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
    return tiles.transpose(1, 2).flatten(2)


def _untile(tiles: Tensor, shape: torch.Size) -> Tensor:
    values: Tensor = tiles.unflatten(2, (FP8_BLOCK, FP8_BLOCK)).transpose(1, 2).reshape(shape)
    return values


def _e8m0(scale: Tensor) -> npt.NDArray[np.uint8]:
    """Powers of two -> exponent bytes."""
    bytes_: npt.NDArray[np.uint8] = (scale.cpu().numpy().view(np.uint32) >> 23).astype(np.uint8)
    return bytes_
