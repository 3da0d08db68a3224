"""Dense fp8 weights expanded in C++ are, bit for bit, those of `formats`."""

from __future__ import annotations

import native_cases as cases
import numpy as np
import pytest

from evrun.kernels import formats, native

CODES = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)


@pytest.mark.parametrize("variant", cases.VARIANTS)
@pytest.mark.parametrize(("rows", "columns"), [(254, 254), (64, 96), (33, 40), (1, 31), (32, 32), (5, 7), (40, 5120)])
def test_every_code_and_scale(variant: str, rows: int, columns: int) -> None:
    random = np.random.default_rng(rows * columns)
    codes = CODES[random.permutation(rows * columns) % len(CODES)].reshape(rows, columns)
    tiles = -(-rows // 32), -(-columns // 32)
    scales = random.integers(0, 255, tiles).astype(np.uint8)
    scales.flat[: min(4, scales.size)] = np.array([0, 1, 254, 127], np.uint8)[: scales.size]
    with np.errstate(over="ignore"):
        wanted = formats.dequantise_fp8_tiles(codes, scales)
    found = np.full((rows, columns), np.nan, np.float32)
    values = formats.e8m0_to_float32(scales)
    native.dequantiser(variant)(codes.ctypes.data, values.ctypes.data, rows, columns, found.ctypes.data)
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def test_an_instruction_set_that_is_not_here() -> None:
    with pytest.raises(native.NativeLibraryError, match="no variant neon here; supported: scalar"):
        native.dequantiser("neon")
