"""Calls of the CUDA backend, for the emulated card and for a real one: inputs, the reference's answer, what may differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pytest

from evrun.kernels import reference
from evrun.kernels.api import BadScaleError, Combine, Dtype, FfnShape, Numerics, Row, tokens_of
from evrun.kernels.cuda.backend import CudaBackend
from evrun.kernels.cuda.errors import NonFiniteError
from evrun.kernels.cuda.params import ROW_FIELDS
from evrun.kernels.formats import bfloat16_bits_to_float32, float32_to_bfloat16_bits

VARIANTS: list[tuple[Numerics, Dtype]] = [
    ("reference", "bfloat16"),
    ("reference", "float32"),
    ("weights-only", "bfloat16"),
    ("weights-only", "float32"),
]


class Side(Protocol):
    """Where the backend's addresses live."""

    stream: Any

    def put(self, array: Any) -> int:
        """The array's bytes at a 16-byte aligned address, until the next `clear`."""

    def get(self, address: int, like: Any) -> Any:
        """The bytes at an address, as an array of this shape and dtype, once the stream is done."""

    def clear(self) -> None: ...


@dataclass
class Problem:
    """A call with everything it needs, in numpy."""

    shape: FfnShape
    x: Any
    ids: Any
    weights: Any
    experts: list[int]
    rows: list[Row]

    @property
    def pairs(self) -> int:
        return sum(len(tokens_of(self.ids, self.weights, e)[0]) for e in self.experts)

    def empty(self, combine: Combine) -> Any:
        """Where the result goes, filled with NaN."""
        if combine == "partial":
            return np.full(self.x.shape, np.nan, np.float32)
        poison = 0x7FFF if self.shape.dtype == "bfloat16" else np.nan
        return np.full((self.pairs, self.x.shape[1]), poison, self.shape.activation_dtype)

    def expected(self, combine: Combine = "partial") -> Any:
        out = self.empty(combine)
        truth = reference.create(self.shape, len(self.x), self.ids.shape[1], 1)
        truth.call(self.x, self.ids, self.weights, self.experts, self.rows, out, combine)
        return out

    def held_by(self, experts: list[int]) -> Problem:
        """The part of the call that a rank with these experts has."""
        chosen = [self.rows[self.experts.index(e)] for e in experts]
        return Problem(self.shape, self.x, self.ids, self.weights, experts, chosen)


def random_row(random: np.random.Generator, shape: FfnShape, low: int = 116, high: int = 122) -> Row:
    """Any code, scale bytes from low to high."""

    def matrix(n: int, k: int) -> tuple[Any, Any]:
        return random.integers(0, 256, (n, k // 2), dtype=np.uint8), random.integers(low, high + 1, (n, k // 32)).astype(np.uint8)

    h, i = shape.hidden, shape.intermediate
    return Row(*matrix(i, h), *matrix(i, h), *matrix(h, i))


def problem(shape: FfnShape, tokens: int, top_k: int, experts: int, held: list[int] | int, seed: int = 0) -> Problem:
    """Random activations of a spread of magnitudes. `held`: the rank's experts, or how many of the first token's."""
    random = np.random.default_rng(seed)
    hidden = shape.hidden
    x = random.standard_normal((tokens, hidden)) * np.exp2(random.integers(-3, 3, (tokens, hidden)))
    x = x.astype(np.float32)
    ids = np.stack([random.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    weights = random.uniform(0.1, 0.6, (tokens, top_k)).astype(np.float32)
    mine = held if isinstance(held, list) else sorted(int(e) for e in ids[0])[:held]
    rows = [random_row(random, shape) for _ in mine]
    return Problem(shape, as_stored(x, shape), ids, weights, mine, rows)


def as_stored(x: Any, shape: FfnShape) -> Any:
    return float32_to_bfloat16_bits(x) if shape.dtype == "bfloat16" else np.asarray(x, np.float32)


def compute(backend: CudaBackend, side: Side, p: Problem, combine: Combine = "partial", onto: Any = None) -> Any:
    """The backend's answer. `onto`: a partial that the call adds to."""
    out = p.empty(combine) if onto is None else onto
    table = np.array([[side.put(getattr(row, name)) for name in ROW_FIELDS] for row in p.rows], np.uint64).reshape(-1, len(ROW_FIELDS))
    out_address = side.put(out)
    if len(p.x) == 1 and backend.single:
        drawn = [(i, float(p.weights[0, k])) for i, e in enumerate(p.experts) for k in range(p.ids.shape[1]) if p.ids[0, k] == e]
        routes = [route for _, route in drawn]
        rows = table[[i for i, _ in drawn]]
        backend.call_single(side.stream, side.put(p.x), rows, routes, out_address, combine, accumulate=onto is not None)
    else:
        addresses = [side.put(array) for array in (p.x, p.ids, p.weights, np.array(p.experts, np.int32), table)]
        backend.call(side.stream, len(p.x), *addresses, len(p.experts), out_address, combine, accumulate=onto is not None)
    result = side.get(out_address, out)
    try:
        backend.check()
    finally:
        side.clear()
    return result


def as_float(array: Any) -> Any:
    return bfloat16_bits_to_float32(array) if array.dtype == np.uint16 else array


def assert_close(got: Any, expected: Any, shape: FfnShape) -> None:
    """Sums of fp32 in another order; where values are rounded on the way, a few fall on the other side of a step."""
    got, expected = as_float(got), as_float(expected)
    assert np.isfinite(got).all()
    error = np.abs(got - expected) / np.sqrt(np.mean(expected.astype(np.float64) ** 2))
    if (shape.numerics, shape.dtype) == ("weights-only", "float32"):
        assert np.sqrt(np.mean(error**2)) < 1e-6
        assert error.max() < 1e-5
    elif shape.dtype == "float32":
        assert np.mean(error > 5e-6) < 2e-2
        assert error.max() < 0.05
    else:
        assert np.mean(error > 1e-6) < 3e-2
        assert error.max() < 0.05


Make = Callable[[FfnShape, int, int, int], CudaBackend]
"""(shape, max_tokens, top_k, num_experts) -> backend"""


def check_matches(make: Make, side: Side, shape: FfnShape, tokens: int, top_k: int = 3, held: list[int] | int = 3) -> None:
    p = problem(shape, tokens, top_k, 8, held)
    backend = make(shape, max(tokens, 2), top_k, 8)
    assert_close(compute(backend, side, p), p.expected(), shape)
    assert_close(compute(backend, side, p, "exact"), p.expected("exact"), shape)
    backend.close()


def check_companions(make: Make, side: Side, shape: FfnShape, tokens: int) -> None:
    """The bits of a row do not depend on which other experts the rank has, nor those of a partial on how a call is split."""
    p = problem(shape, tokens, 3, 8, [0, 1, 2, 4, 5, 7] if tokens > 1 else 3)
    backend = make(shape, tokens, 3, 8)
    together = compute(backend, side, p, "exact")
    alone = [compute(backend, side, p.held_by([e]), "exact") for e in p.experts]
    np.testing.assert_array_equal(together, np.concatenate(alone))
    whole = compute(backend, side, p)
    first = compute(backend, side, p.held_by(p.experts[:2]))
    np.testing.assert_array_equal(compute(backend, side, p.held_by(p.experts[2:]), onto=first), whole)
    np.testing.assert_array_equal(compute(backend, side, p), whole)
    nothing = p.held_by([])
    np.testing.assert_array_equal(compute(backend, side, nothing), np.zeros_like(whole))
    np.testing.assert_array_equal(compute(backend, side, nothing, onto=whole.copy()), whole)
    backend.close()


def check_crowded_experts(make: Make, side: Side, shape: FfnShape) -> None:
    """Experts with 230, 5, 45 and 10 tokens of one call: tiles of every width, several tiles of one expert."""
    p = problem(shape, 240, 2, 8, [0, 1, 2, 3])
    token = np.arange(240)
    p.ids = np.stack([np.where(token < 230, 0, 3), np.where(token < 5, 1, np.where(token < 50, 2, 4))], axis=1).astype(np.int32)
    backend = make(shape, 240, 2, 8)
    assert_close(compute(backend, side, p), p.expected(), shape)
    assert_close(compute(backend, side, p, "exact"), p.expected("exact"), shape)
    backend.close()


EXTREMES = [(8, 112.0, 240), (120, 0.0, 0), (150, 0.0, 129), (128, -2.0, 254)]
"""(scale byte of w1 and w3, log2 of the activations, scale byte of w2)"""


def check_extreme_scales(make: Make, side: Side, shape: FfnShape, tokens: int) -> None:
    backend = make(shape, tokens, 3, 8)
    for up, magnitude, down in EXTREMES:
        p = problem(shape, tokens, 3, 8, [0, 1, 2, 4, 5, 7] if tokens > 1 else 3)
        p.x = as_stored(as_float(p.x) * np.float32(2.0**magnitude), shape)
        for row in p.rows:
            for scales, byte in ((row.s1, up), (row.s3, up), (row.s2, down)):
                scales[...] = byte
        if down == 254:
            for row in p.rows:
                row.w2[...] &= 0x99  # codes 0, 1 and their negatives: no weight overflows
            p.weights *= np.float32(2.0**-7)  # nor does a sum
        assert_close(compute(backend, side, p), p.expected(), shape)
    backend.close()


def check_refusals(make: Make, side: Side, shape: FfnShape, tokens: int) -> None:
    """Scale byte 255 is named; so is a sum that is not finite without one; the next call is served."""
    p = problem(shape, tokens, 3, 8, [0, 1, 2, 4, 5, 7] if tokens > 1 else 3)
    backend = make(shape, tokens, 3, 8)
    expected = compute(backend, side, p)
    for tensor in ("w1", "w3", "w2"):
        scales = getattr(p.rows[1], tensor.replace("w", "s"))
        kept = scales[5, 1]
        scales[5, 1] = 255
        with pytest.raises(BadScaleError) as refused:
            compute(backend, side, p)
        assert (refused.value.expert, refused.value.tensor, refused.value.row) == (1, tensor, 5)
        scales[5, 1] = kept
    x = p.x
    p.x = as_stored(np.where(np.arange(shape.hidden) == 7, np.inf, as_float(x)), shape)
    with pytest.raises(NonFiniteError):
        compute(backend, side, p)
    p.x = x
    np.testing.assert_array_equal(compute(backend, side, p), expected)
    backend.close()
