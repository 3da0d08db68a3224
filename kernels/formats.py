"""Number formats of the release in readable numpy: E2M1, E8M0, E4M3, bfloat16, and the roundings made with them (spec 2.4, 3).

Codes are kept as stored; nothing is transposed or repacked. `formats_torch` holds the same functions for tensors. The
rounding functions quantise and dequantise at once ("QDQ"): they return fp32 values that the format can hold.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]

FP8_BLOCK = 32
"""Channels of one activation or KV scale; also rows and columns of one dense weight tile."""
FP4_WEIGHT_GROUP = 32
"""Columns of one scale of a packed expert."""
FP4_KV_GROUP = 16
"""Channels of one scale of a compressed KV entry."""
E4M3_MAX = 448.0
E2M1_MAX = 6.0
FP8_FLOOR = 1e-4
"""Smallest block maximum of an E4M3 rounding."""
FP4_KV_FLOOR = 6 * 2.0**-9
"""Smallest group maximum with an E4M3 scale: its scale is the smallest E4M3 number."""
FP4_INDEX_FLOOR = 6 * 2.0**-126
"""Smallest group maximum with a power-of-two scale: its scale is the smallest normal fp32 number."""

E8M0_NAN = 255
E2M1_VALUES: F32 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""[16] value of a code; code 8 is a zero, its sign has no consequence."""


def _e4m3_values() -> F32:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    magnitude[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -magnitude, magnitude).astype(np.float32)


E4M3_VALUES: F32 = _e4m3_values()
"""[256] value of a code: no infinities, 0x7F and 0xFF are NaN, largest 448, smallest 2^-9."""


def is_e4m3_nan(codes: U8) -> npt.NDArray[np.bool_]:
    """Where an E4M3 code is one of the two NaNs."""
    result: npt.NDArray[np.bool_] = (codes & 127) == 127
    return result


def e8m0_to_float32(codes: U8) -> F32:
    """2^(b - 127), subnormal for b = 0, NaN for b = 255."""
    bits: npt.NDArray[np.uint32] = codes.astype(np.uint32) << np.uint32(23)
    bits[codes == 0] = 1 << 22
    bits[codes == E8M0_NAN] = 0x7FC00000
    values: F32 = bits.view(np.float32)
    return values


def e4m3_to_float32(codes: U8) -> F32:
    values: F32 = E4M3_VALUES[codes]
    return values


def float32_to_e4m3(x: npt.ArrayLike) -> U8:
    """Nearest code, ties to the even one; beyond the range the largest number of that sign, NaN stays NaN."""
    x = np.asarray(x, np.float32)
    magnitude = np.minimum(np.abs(x), np.float32(E4M3_MAX))
    step = np.ldexp(np.float32(1), np.maximum(np.frexp(magnitude)[1] - 1, -6) - 3)
    rounded = (np.rint(magnitude / step) * step).astype(np.float32)
    normal = (rounded.view(np.uint32) >> 20).astype(np.int64) - (120 << 3)
    codes = np.where(np.isnan(x), 127, np.where(rounded < 2.0**-6, rounded * 2.0**9, normal)).astype(np.uint8)
    signed: U8 = codes | (np.signbit(x).astype(np.uint8) << 7)
    return signed


def float32_to_bfloat16_bits(x: npt.ArrayLike) -> U16:
    """Nearest bfloat16, ties to the even one, as raw bits."""
    x = np.ascontiguousarray(x, np.float32)
    bits = x.view(np.uint32).astype(np.uint64)  # room for the carry of a NaN
    rounded: U16 = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def bfloat16_bits_to_float32(bits: U16) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def unpack_e2m1(packed: U8) -> F32:
    """[..., K/2] bytes -> [..., K] values: the low nibble comes first."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values: F32 = E2M1_VALUES[codes]
    return values


def pack_e2m1(codes: U8) -> U8:
    """[..., K] codes -> [..., K/2] bytes: the low nibble comes first."""
    pairs = codes.reshape(*codes.shape[:-1], -1, 2)
    packed: U8 = pairs[..., 0] | (pairs[..., 1] << np.uint8(4))
    return packed


def float32_to_e2m1(x: npt.ArrayLike) -> U8:
    """Nearest code, ties to the even one; beyond the range the largest number of that sign."""
    x = np.asarray(x, np.float32)
    magnitude = np.minimum(np.abs(x), np.float32(E2M1_MAX))
    codes: U8 = np.searchsorted(E2M1_VALUES[:8], _round_e2m1(magnitude)).astype(np.uint8)
    signs: U8 = np.signbit(x).astype(np.uint8) << 3
    return codes + signs


def _round_e2m1(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """|x| <= 6. The spacing is 0.5 below 2, 1 below 4, 2 above; rint rounds ties to the even multiple, the even code."""
    magnitude = np.abs(x)
    step = np.where(magnitude < 2, 0.5, np.where(magnitude < 4, 1.0, 2.0)).astype(np.float32)
    rounded: npt.NDArray[Any] = np.rint(x / step) * step
    return rounded


def dequantise_fp8_tiles(codes: U8, scales: U8) -> F32:
    """Dense weight: codes [N, K] E4M3, scales [ceil(N/32), ceil(K/32)] E8M0, one per 32 x 32 tile -> [N, K]."""
    rows = np.repeat(e8m0_to_float32(scales), FP8_BLOCK, axis=0)[: codes.shape[0]]
    return E4M3_VALUES[codes] * np.repeat(rows, FP8_BLOCK, axis=1)[:, : codes.shape[1]]


def dequantise_fp8_rows(codes: U8, scales: U8) -> F32:
    """Engram rows: codes [..., K] E4M3, scales [..., K/32] E8M0, one per 32 columns of a row -> [..., K]."""
    return E4M3_VALUES[codes] * np.repeat(e8m0_to_float32(scales), FP8_BLOCK, axis=-1)


def dequantise_fp4_rows(packed: U8, scales: U8) -> F32:
    """Routed expert: packed [N, K/2] E2M1, scales [N, K/32] E8M0, one per 32 columns of a row -> [N, K]."""
    return unpack_e2m1(packed) * np.repeat(e8m0_to_float32(scales), FP4_WEIGHT_GROUP, axis=-1)


def power_of_two_ceil(x: npt.ArrayLike) -> F32:
    """Smallest power of two >= x, exact on the bits; x fp32, positive, normal."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFFFF) & 0x7F800000).astype(np.uint32).view(np.float32)


def round_fp8(x: npt.ArrayLike) -> F32:
    """QDQ to E4M3 with a power-of-two scale per 32 channels: inputs of quantised linears, window KV (spec 3.2). [..., K] -> same."""
    blocks, shape = _blocks(x, FP8_BLOCK)
    peak = np.maximum(np.abs(blocks).max(-1, keepdims=True), np.float32(FP8_FLOOR))
    scale = power_of_two_ceil(peak * np.float32(1 / E4M3_MAX))
    values: F32 = E4M3_VALUES[float32_to_e4m3(blocks / scale)] * scale
    return values.reshape(shape)


def round_fp4_kv(x: npt.ArrayLike) -> F32:
    """QDQ to E2M1 with an E4M3 scale per 16 channels: compressed KV entries (spec 3.6). [..., K] -> same."""
    blocks, shape = _blocks(x, FP4_KV_GROUP)
    peak = np.maximum(np.abs(blocks).max(-1, keepdims=True), np.float32(FP4_KV_FLOOR))
    scale = E4M3_VALUES[float32_to_e4m3(peak / np.float32(E2M1_MAX))]
    return _scaled_e2m1(blocks, scale).reshape(shape)


def round_fp4_index(x: npt.ArrayLike) -> F32:
    """QDQ to E2M1 with a power-of-two scale per 32 channels: index queries and keys (spec 3.7). [..., K] -> same."""
    blocks, shape = _blocks(x, FP4_WEIGHT_GROUP)
    peak = np.maximum(np.abs(blocks).max(-1, keepdims=True), np.float32(FP4_INDEX_FLOOR))
    return _scaled_e2m1(blocks, power_of_two_ceil(peak * np.float32(1 / E2M1_MAX))).reshape(shape)


def _scaled_e2m1(blocks: F32, scale: F32) -> F32:
    values: F32 = _round_e2m1(np.clip(blocks / scale, -E2M1_MAX, E2M1_MAX)) * scale
    return values


def _blocks(x: npt.ArrayLike, width: int) -> tuple[F32, tuple[int, ...]]:
    values = np.asarray(x, np.float32)
    return values.reshape(*values.shape[:-1], -1, width), values.shape
