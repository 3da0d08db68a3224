"""Random calls for the native backend, and the functions they are compared to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from evrun.kernels import formats, native
from evrun.kernels.api import FfnShape, Row, tokens_of

Array = npt.NDArray[Any]

VARIANTS = [v.name for v in native.variants() if v.supported]


@dataclass
class Case:
    shape: FfnShape
    x: Array
    ids: Array
    weights: Array
    experts: list[int]
    rows: list[Row]

    @property
    def pairs(self) -> int:
        return int(np.isin(self.ids, self.experts).sum())

    def out(self, combine: str) -> Array:
        if combine == "exact":
            return np.zeros((self.pairs, self.shape.hidden), self.shape.activation_dtype)
        return np.full((len(self.x), self.shape.hidden), np.nan, np.float32)

    def create(self, threads: int = 1, variant: str | None = None, max_tokens: int | None = None) -> native.NativeBackend:
        return native.create(self.shape, max_tokens or max(1, len(self.x)), self.ids.shape[1], threads, variant=variant)

    def run(self, backend: Any, combine: str = "partial") -> Array:
        out = self.out(combine)
        assert backend.call(self.x, self.ids, self.weights, self.experts, self.rows, out, combine) == self.pairs
        return out

    def of_tokens(self, tokens: Sequence[int]) -> Case:
        return Case(self.shape, self.x[tokens], self.ids[tokens], self.weights[tokens], self.experts, self.rows)


def random_matrix(rng: np.random.Generator, n: int, k: int, low: int, high: int) -> tuple[Array, Array]:
    return rng.integers(0, 256, (n, k // 2), dtype=np.uint8), rng.integers(low, high + 1, (n, k // 32), dtype=np.uint8)


def random_row(rng: np.random.Generator, hidden: int, intermediate: int, low: int = 117, high: int = 123) -> Row:
    first = [random_matrix(rng, intermediate, hidden, low, high) for _ in range(2)]
    return Row(*first[0], *first[1], *random_matrix(rng, hidden, intermediate, low, high))


def random_case(
    shape: FfnShape, tokens: int, seed: int = 0, experts: int = 6, top_k: int = 3, mine: Sequence[int] | None = None, **scales: int
) -> Case:
    """Every token draws top_k of the experts; this rank has those of `mine` (default: all but one)."""
    rng = np.random.default_rng(seed)
    rows = [random_row(rng, shape.hidden, shape.intermediate, **scales) for _ in range(experts)]
    mine = list(mine) if mine is not None else [e for e in range(experts) if e != 2]
    ids = np.array([rng.permutation(experts)[:top_k] for _ in range(tokens)], np.int32).reshape(tokens, top_k)
    # Heavy tails, as activations have: some groups need every digit of an E4M3 code.
    x = (rng.standard_normal((tokens, shape.hidden)) * np.exp2(rng.integers(-12, 3, (tokens, shape.hidden)))).astype(np.float32)
    weights = rng.uniform(0.1, 0.6, (tokens, top_k)).astype(np.float32)
    return Case(shape, stored(x, shape), ids, weights, mine, [rows[e] for e in mine])


def stored(x: Array, shape: FfnShape) -> Array:
    return formats.float32_to_bfloat16_bits(x) if shape.dtype == "bfloat16" else x.astype(np.float32)


def loaded(x: Array) -> Array:
    return formats.bfloat16_bits_to_float32(x) if x.dtype == np.uint16 else x


def per_pair(case: Case, linear: Any, silu: Any) -> Array:
    """[pairs, H] by plain numpy: `linear(x, codes, scales)`, `silu(g)`; roundings where the contract has them."""
    shape = case.shape

    def rounded(v: Array) -> Array:
        return loaded(formats.float32_to_bfloat16_bits(v)) if shape.dtype == "bfloat16" else v

    def quantised(v: Array) -> Array:
        return formats.round_fp8(v) if shape.numerics == "reference" else v

    results = []
    for expert, row in zip(case.experts, case.rows, strict=True):
        tokens, route = tokens_of(case.ids, case.weights, expert)
        if len(tokens):
            x = quantised(loaded(case.x[tokens]))
            g, u = rounded(linear(x, row.w1, row.s1)), rounded(linear(x, row.w3, row.s3))
            a = silu(np.minimum(g, shape.swiglu_limit)) * np.clip(u, -shape.swiglu_limit, shape.swiglu_limit)
            results.append(rounded(linear(quantised(rounded(route[:, None] * a)), row.w2, row.s2)))
    return np.concatenate(results)


def double_linear(x: Array, codes: Array, scales: Array) -> Array:
    """fp64 sums, kept in fp64 where nothing rounds them."""
    values = formats.unpack_e2m1(codes).astype(np.float64) * np.repeat(np.exp2(scales.astype(np.float64) - 127), 32, axis=1)
    product: Array = np.einsum("tk,nk->tn", x.astype(np.float64), values)  # not BLAS, whose threads spin beside others
    return product


def double_silu(g: Array) -> Array:
    g = g.astype(np.float64)
    result: Array = g / (1 + np.exp(-g))
    return result
