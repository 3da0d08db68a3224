"""The formats of `formats` for torch tensors, on any device: dequantising weights, and the roundings of the model (QDQ).

Every function takes and returns fp32. Apart from the import of torch nothing here differs in value from `formats`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evrun.kernels.formats import (
    E2M1_MAX,
    E4M3_MAX,
    FP4_INDEX_FLOOR,
    FP4_KV_FLOOR,
    FP4_KV_GROUP,
    FP4_WEIGHT_GROUP,
    FP8_BLOCK,
    FP8_FLOOR,
)

_ONE_448TH = float(torch.tensor(1 / E4M3_MAX, dtype=torch.float32))
_ONE_SIXTH = float(torch.tensor(1 / E2M1_MAX, dtype=torch.float32))
"""Reciprocals rounded to fp32, as the reference multiplies with them."""


def e8m0_to_float32(codes: Tensor) -> Tensor:
    """2^(b - 127) of uint8 codes; b = 255 is refused while loading and never gets here."""
    bits = codes.to(torch.int32).bitwise_left_shift_(23)
    return bits.masked_fill_(codes == 0, 1 << 22).view(torch.float32)


def e4m3_to_float32(codes: Tensor) -> Tensor:
    """Values of uint8 codes without NaNs.

    Sign, exponent and mantissa are moved to their places in a bfloat16, whose exponent bias is 120 higher: several
    times as fast as the cast from float8_e4m3fn, subnormals included.
    """
    bits = codes.view(torch.int8).to(torch.int16)
    bits.bitwise_left_shift_(4).bitwise_and_(_E4M3_IN_BF16)
    values: Tensor = bits.view(torch.bfloat16).to(torch.float32).mul_(2.0**120)
    return values


_E4M3_IN_BF16 = 0x87F0 - 0x10000
"""The eight bits of a code, four places up, with the sign at the top; as a signed 16-bit number."""


def dequantise_fp8_tiles(codes: Tensor, scales: Tensor) -> Tensor:
    """codes [N, K] uint8 E4M3, scales [ceil(N/32), ceil(K/32)] fp32 values, one per 32 x 32 tile -> [N, K] fp32."""
    rows, columns = codes.shape
    values = e4m3_to_float32(codes)
    if rows % FP8_BLOCK or columns % FP8_BLOCK:
        spread = scales.repeat_interleave(FP8_BLOCK, 0)[:rows]
        return values.mul_(spread.repeat_interleave(FP8_BLOCK, 1)[:, :columns])
    tiles = values.view(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
    tiles.mul_(scales[:, None, :, None])
    return values


def dequantise_fp8_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """codes [..., K] uint8 E4M3, scales [..., K/32] uint8 E8M0, one per 32 columns of a row -> [..., K] fp32."""
    values = _blocks(e4m3_to_float32(codes), FP8_BLOCK)
    values.mul_(e8m0_to_float32(scales)[..., None])
    return values.flatten(-2)


def power_of_two_ceil(x: Tensor) -> Tensor:
    """Smallest power of two >= x, exact on the bits; x fp32, positive, normal."""
    return (x.view(torch.int32) + 0x7FFFFF).bitwise_and_(0x7F800000).view(torch.float32)


def round_fp8(x: Tensor) -> Tensor:
    """QDQ to E4M3 with a power-of-two scale per 32 channels: inputs of quantised linears, window KV (spec 3.2). [..., K] -> same."""
    blocks = _blocks(x, FP8_BLOCK)
    peak = blocks.abs().amax(-1, keepdim=True).clamp_(min=FP8_FLOOR)
    scale = power_of_two_ceil(peak.mul_(_ONE_448TH))
    codes = (blocks / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    values = codes.to(torch.float32).mul_(scale)
    return values.flatten(-2)


def round_fp4_kv(x: Tensor) -> Tensor:
    """QDQ to E2M1 with an E4M3 scale per 16 channels: compressed KV entries (spec 3.6). [..., K] -> same."""
    blocks = _blocks(x, FP4_KV_GROUP)
    peak = blocks.abs().amax(-1, keepdim=True).clamp_(min=FP4_KV_FLOOR)
    # A tensor as divisor: CUDA divides by a number through its reciprocal, which is another last bit.
    scale = peak.div_(torch.full_like(peak, E2M1_MAX)).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    return _scaled_e2m1(blocks, scale)


def round_fp4_index(x: Tensor) -> Tensor:
    """QDQ to E2M1 with a power-of-two scale per 32 channels: index queries and keys (spec 3.7). [..., K] -> same."""
    blocks = _blocks(x, FP4_WEIGHT_GROUP)
    peak = blocks.abs().amax(-1, keepdim=True).clamp_(min=FP4_INDEX_FLOOR)
    return _scaled_e2m1(blocks, power_of_two_ceil(peak.mul_(_ONE_SIXTH)))


def _scaled_e2m1(blocks: Tensor, scale: Tensor) -> Tensor:
    """Spacing of E2M1 is half the power of two below |v|, at least 0.5; round() takes ties to the even multiple, the even code."""
    v = (blocks / scale).clamp_(-E2M1_MAX, E2M1_MAX)
    step = v.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32).clamp_(min=1.0).mul_(0.5)
    return v.div_(step).round_().mul_(step).mul_(scale).flatten(-2)


def _blocks(x: Tensor, width: int) -> Tensor:
    """[..., K] -> view [..., K / width, width]."""
    blocks: Tensor = x.unflatten(-1, (-1, width))
    return blocks
