"""Number formats: the model specification's own examples, every code, numpy against torch (spec 2.4, 3.2, 3.6, 3.7)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from evrun.kernels import formats, formats_torch

ALL_BYTES = np.arange(256, dtype=np.uint8)
ROUNDINGS: list[tuple[Callable[..., np.ndarray], Callable[[torch.Tensor], torch.Tensor]]] = [
    (formats.round_fp8, formats_torch.round_fp8),
    (formats.round_fp4_kv, formats_torch.round_fp4_kv),
    (formats.round_fp4_index, formats_torch.round_fp4_index),
]


def block(*values: float, width: int = 32) -> np.ndarray:
    """One block, filled up with zeros."""
    out = np.zeros(width, np.float32)
    out[: len(values)] = values
    return out


def scale_of(rounded: np.ndarray, code_value: float) -> float:
    """The scale of a block whose first element must have become this code."""
    return float(rounded[0] / code_value)


def test_e8m0() -> None:
    codes = np.array([127, 120, 0, 1, 254], np.uint8)
    assert formats.e8m0_to_float32(codes).tolist() == [1, 2**-7, 2**-127, 2**-126, 2**127]
    assert np.isnan(formats.e8m0_to_float32(np.array([255], np.uint8)))[0]
    assert formats_torch.e8m0_to_float32(torch.from_numpy(ALL_BYTES[:255])).tolist() == formats.e8m0_to_float32(ALL_BYTES[:255]).tolist()


def test_e4m3_examples() -> None:
    codes = np.array([0x38, 0xD8, 0x71, 0x79, 0x7E, 0x01], np.uint8)
    assert formats.e4m3_to_float32(codes).tolist() == [1, -16, 144, 288, 448, 2**-9]
    assert formats.is_e4m3_nan(ALL_BYTES).nonzero()[0].tolist() == [0x7F, 0xFF]


def test_e4m3_is_torchs_own_format() -> None:
    wanted = torch.from_numpy(ALL_BYTES.copy()).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(formats.E4M3_VALUES, wanted)
    plain = ~formats.is_e4m3_nan(ALL_BYTES)
    found = formats_torch.e4m3_to_float32(torch.from_numpy(ALL_BYTES[plain]))
    assert found.view(torch.int32).tolist() == wanted[plain].view(np.int32).tolist()


def test_e4m3_rounding_is_torchs_inside_the_range() -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(20000) * np.exp2(rng.integers(-12, 7, 20000))).astype(np.float32).clip(-448, 448)
    middle = (formats.E4M3_VALUES[:126] + formats.E4M3_VALUES[1:127]) / 2
    x = np.concatenate([x, middle, -middle, formats.E4M3_VALUES[:127], [464, 1e30, -np.inf, np.nan]]).astype(np.float32)
    wanted = torch.from_numpy(x.clip(-448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    wanted[-1] &= 127
    np.testing.assert_array_equal(formats.float32_to_e4m3(x), wanted)


def test_e2m1_values_and_ties() -> None:
    assert formats.E2M1_VALUES[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert formats.E2M1_VALUES[9:].tolist() == [-0.5, -1, -1.5, -2, -3, -4, -6]
    ties = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4}
    for tie, value in ties.items():
        for sign in (1, -1):
            assert formats.E2M1_VALUES[formats.float32_to_e2m1([sign * tie])][0] == sign * value
            # a peak of 6 makes the scale 1 in both fp4 roundings
            for width, (numpy_rounding, torch_rounding) in zip((16, 32), ROUNDINGS[1:], strict=True):
                x = block(6, sign * tie, width=width)
                assert numpy_rounding(x)[1] == sign * value
                assert torch_rounding(torch.from_numpy(x))[1] == sign * value
    assert formats.E2M1_VALUES[formats.float32_to_e2m1([100.0, -7])].tolist() == [6, -6]
    np.testing.assert_array_equal(formats.float32_to_e2m1(formats.E2M1_VALUES), ALL_BYTES[:16])


def test_e2m1_nibbles() -> None:
    np.testing.assert_array_equal(formats.unpack_e2m1(np.array([0x1F, 0x80], np.uint8)), [-6, 0.5, 0, -0.0])
    np.testing.assert_array_equal(formats.pack_e2m1(np.array([15, 1, 0, 8], np.uint8)), [0x1F, 0x80])


def test_bytes_of_the_release() -> None:
    dense = np.array([[0xD8, 0x71, 0xF2, 0x79, 0x70, 0x69, 0xF0, 0xE5]], np.uint8)
    wanted = [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
    assert formats.dequantise_fp8_tiles(dense, np.array([[0x73]], np.uint8))[0].tolist() == wanted
    packed = np.array([[0xA0, 0xA8, 0xEC, 0x4A, 0xAD, 0xAF, 0x42, 0xAA] + [0] * 8], np.uint8)
    wanted = [0, -0.0078125, 0, -0.0078125, -0.015625, -0.03125, -0.0078125, 0.015625, -0.0234375, -0.0078125,
              -0.046875, -0.0078125, 0.0078125, 0.015625, -0.0078125, -0.0078125]  # fmt: skip
    assert formats.dequantise_fp4_rows(packed, np.array([[0x78]], np.uint8))[0, :16].tolist() == wanted


@pytest.mark.parametrize("shape", [(64, 96), (32, 32), (40, 96), (144, 70)])
def test_dense_tiles(shape: tuple[int, int]) -> None:
    """One scale per 32 x 32 tile, also where the last tiles are cut."""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 127, shape, np.uint8)
    scales = rng.integers(100, 140, (-(-shape[0] // 32), -(-shape[1] // 32)), np.uint8)
    wanted = np.array([[formats.E4M3_VALUES[codes[r, c]] * 2.0 ** (int(scales[r // 32, c // 32]) - 127) for c in range(shape[1])]
                       for r in range(shape[0])], np.float32)  # fmt: skip
    np.testing.assert_array_equal(formats.dequantise_fp8_tiles(codes, scales), wanted)
    found = formats_torch.dequantise_fp8_tiles(torch.from_numpy(codes), formats_torch.e8m0_to_float32(torch.from_numpy(scales)))
    np.testing.assert_array_equal(found.numpy(), wanted)


def test_engram_rows() -> None:
    rng = np.random.default_rng(2)
    codes, scales = rng.integers(0, 127, (5, 3, 64), np.uint8), rng.integers(100, 140, (5, 3, 2), np.uint8)
    wanted = formats.E4M3_VALUES[codes] * np.repeat(np.exp2(scales.astype(np.float32) - 127), 32, axis=-1)
    np.testing.assert_array_equal(formats.dequantise_fp8_rows(codes, scales), wanted)
    np.testing.assert_array_equal(formats_torch.dequantise_fp8_rows(torch.from_numpy(codes), torch.from_numpy(scales)).numpy(), wanted)


@pytest.mark.parametrize(("peak", "exponent"), [(448, 0), (449, 1), (6, -6), (1, -8)])
def test_fp8_scale(peak: float, exponent: int) -> None:
    """The scale is seen in the spacing: the smallest E4M3 step times 2^exponent."""
    unit = 2.0 ** (exponent - 9)
    x = block(peak, unit, 0.4 * unit)
    for rounded in (formats.round_fp8(x), formats_torch.round_fp8(torch.from_numpy(x)).numpy()):
        assert rounded[1:3].tolist() == [unit, 0]
        assert abs(rounded[0] - peak) <= peak / 16


def test_fp8_scale_of_nothing() -> None:
    """The floor of 1e-4 gives 2^-22: what is below half the smallest step vanishes, zeros stay zeros."""
    x = block(2.0**-31, 0.4 * 2.0**-31)
    for rounded in (formats.round_fp8(x), formats_torch.round_fp8(torch.from_numpy(x)).numpy()):
        assert rounded[:3].tolist() == [2.0**-31, 0, 0]


@pytest.mark.parametrize(("peak", "scale"), [(1, 0.171875), (3.3, 0.5625), (6, 1), (100, 16), (2688, 448), (1e5, 448)])
def test_fp4_kv_scale(peak: float, scale: float) -> None:
    x = block(peak, width=16)
    for rounded in (formats.round_fp4_kv(x), formats_torch.round_fp4_kv(torch.from_numpy(x)).numpy()):
        assert scale_of(rounded, 6) == scale


def test_fp4_kv_scale_of_nothing() -> None:
    x = block(2.0**-10, width=16)
    for rounded in (formats.round_fp4_kv(x), formats_torch.round_fp4_kv(torch.from_numpy(x)).numpy()):
        assert scale_of(rounded, 0.5) == 0.001953125


@pytest.mark.parametrize(("peak", "scale", "code_value"), [(6, 1, 6), (6.5, 2, 3), (3, 0.5, 6), (1, 0.25, 4), (0.75, 0.125, 6)])
def test_fp4_index_scale(peak: float, scale: float, code_value: float) -> None:
    x = block(peak)
    for rounded in (formats.round_fp4_index(x), formats_torch.round_fp4_index(torch.from_numpy(x)).numpy()):
        assert scale_of(rounded, code_value) == scale


@settings(max_examples=60, deadline=None)
@given(arrays(np.float32, 64, elements=st.floats(-1e6, 1e6, width=32)), st.integers(-30, 10))
def test_roundings_in_numpy_and_torch_are_the_same_and_settle(x: np.ndarray, exponent: int) -> None:
    x = np.ldexp(x, exponent).astype(np.float32)
    for numpy_rounding, torch_rounding in ROUNDINGS:
        once = numpy_rounding(x)
        np.testing.assert_array_equal(torch_rounding(torch.from_numpy(x)).numpy(), once)
        assert torch.equal(torch.from_numpy(once).bfloat16().float(), torch.from_numpy(once))  # exact in bfloat16
    np.testing.assert_array_equal(formats.round_fp8(formats.round_fp8(x)), formats.round_fp8(x))


def test_bfloat16_bits() -> None:
    rng = np.random.default_rng(3)
    odd = [0, -0.0, np.inf, -np.inf, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38, 1e-40]
    x = np.concatenate([rng.standard_normal(1000), odd]).astype(np.float32)
    wanted = torch.from_numpy(x).bfloat16()
    np.testing.assert_array_equal(formats.float32_to_bfloat16_bits(x), wanted.view(torch.uint16).numpy())
    np.testing.assert_array_equal(formats.bfloat16_bits_to_float32(wanted.view(torch.uint16).numpy()), wanted.float().numpy())
    assert np.isnan(formats.bfloat16_bits_to_float32(formats.float32_to_bfloat16_bits([np.nan])))[0]
