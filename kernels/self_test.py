"""A CPU backend against float64 on one tiny expert, before the worker says that it is ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from evrun.kernels.api import U8, CpuBackend, FfnShape, Row

HIDDEN, INTERMEDIATE, TOKENS = 96, 64, 3
SHAPE_OF_TEST = "3 tokens, 96 x 64"


def shape_like(shape: FfnShape) -> FfnShape:
    """The tiny shape with the numerics, dtype and clamp of the run."""
    return FfnShape(HIDDEN, INTERMEDIATE, shape.swiglu_limit, shape.numerics, shape.dtype)


def run(backend: CpuBackend, shape: FfnShape) -> str | None:
    """None, or how far the backend is from float64. `shape` is what `shape_like` gave and the backend was made for."""
    row = random_row(shape)
    x, stored, ids, route = _tokens(shape, TOKENS)
    out = np.empty((TOKENS, HIDDEN), np.float32)
    backend.call(stored, ids, route, [0], [row], out, "partial")

    g, u = x @ _expand(row.w1, row.s1).T, x @ _expand(row.w3, row.s3).T
    a = route * np.minimum(g, shape.swiglu_limit) / (1 + np.exp(-np.minimum(g, shape.swiglu_limit)))
    expected = (a * np.clip(u, -shape.swiglu_limit, shape.swiglu_limit)) @ _expand(row.w2, row.s2).T
    error = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
    # Rounding activations to E4M3 moves results by about 5 %, rounding to bf16 by 0.4 %, fp32 sums by 1e-6.
    allowed = 0.12 if shape.numerics == "reference" else 0.02 if shape.dtype == "bfloat16" else 1e-5
    return None if error <= allowed else f"{SHAPE_OF_TEST}: relative error {error:.2g} against float64, at most {allowed:.2g} expected"


def random_row(shape: FfnShape) -> Row:
    """A row of this size with codes all over and scales that give outputs of ordinary size."""
    random = np.random.default_rng(7)

    def matrix(n: int, k: int) -> tuple[U8, U8]:
        return random.integers(0, 256, (n, k // 2), dtype=np.uint8), random.integers(118, 123, (n, k // 32), dtype=np.uint8)

    up = shape.intermediate, shape.hidden
    return Row(*matrix(*up), *matrix(*up), *matrix(*reversed(up)))


def compare(
    run: Callable[..., npt.NDArray[np.float32]], reference: Callable[..., int], shape: FfnShape, row: Row, tokens: int
) -> str | None:
    """None, or how far `run(x, ids, weights)` is from `reference`, a CpuBackend's call, on one row of any size."""
    _, stored, ids, route = _tokens(shape, tokens)
    expected = np.empty((tokens, shape.hidden), np.float32)
    reference(stored, ids, route, [0], [row], expected, "partial")
    error = float(np.linalg.norm(run(stored, ids, route) - expected) / np.linalg.norm(expected))
    allowed = 1e-2 if shape.dtype == "bfloat16" or shape.numerics == "reference" else 1e-5
    return None if error <= allowed else f"{tokens} token(s): relative error {error:.2g} against the CPU, at most {allowed:.2g} expected"


_Tokens = tuple[npt.NDArray[np.float32], npt.NDArray[Any], npt.NDArray[np.int32], npt.NDArray[np.float32]]


def _tokens(shape: FfnShape, tokens: int) -> _Tokens:
    """x as fp32 values that bf16 holds exactly, x as stored, ids, route weights; every token draws expert 0."""
    random = np.random.default_rng(11)
    bits = random.standard_normal((tokens, shape.hidden)).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    x = bits.view(np.float32)
    stored = (bits >> 16).astype(np.uint16) if shape.dtype == "bfloat16" else x
    return x, stored, np.zeros((tokens, 1), np.int32), random.uniform(0.2, 0.6, (tokens, 1)).astype(np.float32)


def _expand(codes: U8, scales: U8) -> npt.NDArray[np.float64]:
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    matrix = np.stack([values[codes & 15], values[codes >> 4]], axis=-1).reshape(codes.shape[0], -1)
    expanded: npt.NDArray[np.float64] = matrix * np.repeat(np.exp2(scales.astype(np.float64) - 127), 32, axis=1)
    return expanded
