"""Calls of one token through the native function that a worker serves them with: same bits, same refusals."""

from __future__ import annotations

import ctypes
from typing import Any

import native_cases as cases
import pytest
from one_token_call import RECORD, serve

from evrun.kernels.api import Dtype, FfnShape, OneToken, Row

LAYERS, LAYER, EXPERTS, ROW_BYTES = 3, 1, 6, 1000


def answer(short: OneToken, case: cases.Case, out: cases.Array, layer: int = LAYER, **more: Any) -> int:
    return serve(short, layer, case.experts, case.x, case.ids, case.weights, out, **more)


@pytest.mark.parametrize("variant", cases.VARIANTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("combine", ["partial", "exact"])
def test_the_bits_are_those_of_the_backend(variant: str, dtype: Dtype, combine: str) -> None:
    case = cases.random_case(FfnShape(288, 160, 2.5, "reference", dtype), 1, mine=range(EXPERTS), top_k=EXPERTS)
    backend = case.create(variant=variant)
    expected = case.run(backend, combine)
    read = ctypes.c_int64(5)
    short = backend.one_token(LAYERS, EXPERTS, ROW_BYTES, combine == "exact", ctypes.addressof(read))
    for expert, row in zip(case.experts, case.rows, strict=True):
        assert answer(short, case, case.out(combine)) == -1  # not all rows are known yet
        short.learn(LAYER, expert, row)
    assert read.value == 5
    for number in range(1, 4):
        out = case.out(combine)
        assert answer(short, case, out) == case.pairs
        assert (out == expected).all()
        assert read.value == 5 + number * EXPERTS * ROW_BYTES


def test_layers_have_rows_of_their_own() -> None:
    case = cases.random_case(FfnShape(96, 64, 2.5, "reference", "bfloat16"), 1, mine=[1, 3])
    backend = case.create()
    read = ctypes.c_int64()
    short = backend.one_token(LAYERS, EXPERTS, ROW_BYTES, False, ctypes.addressof(read))
    for expert, row in zip(case.experts, case.rows, strict=True):
        short.learn(LAYER, expert, row)
    assert answer(short, case, case.out("partial")) == case.pairs
    for layer in (-1, LAYER - 1, LAYER + 1, LAYERS):
        assert answer(short, case, case.out("partial"), layer) == -1


def test_a_bad_scale_is_left_to_the_backend() -> None:
    case = cases.random_case(FfnShape(96, 64, 2.5, "reference", "bfloat16"), 1, mine=range(EXPERTS), top_k=EXPERTS)
    bad = case.rows[4].s3.copy()
    bad[3, 1] = 255
    case.rows[4] = Row(*case.rows[4][:3], bad, *case.rows[4][4:])
    backend = case.create()
    read = ctypes.c_int64()
    short = backend.one_token(LAYERS, EXPERTS, ROW_BYTES, False, ctypes.addressof(read))
    for expert, row in zip(case.experts, case.rows, strict=True):
        short.learn(LAYER, expert, row)
    assert answer(short, case, case.out("partial")) == -1
    assert read.value == 0


def test_a_long_call_shows_progress_to_its_record() -> None:
    case = cases.random_case(FfnShape(4096, 2048, 2.5, "reference", "float32"), 1, mine=range(EXPERTS), top_k=EXPERTS)
    backend = case.create(variant="scalar")
    read = ctypes.c_int64()
    short = backend.one_token(LAYERS, EXPERTS, ROW_BYTES, False, ctypes.addressof(read))
    for expert, row in zip(case.experts, case.rows, strict=True):
        short.learn(LAYER, expert, row)
    seen: list[int | None] = []
    assert answer(short, case, case.out("partial"), beat=seen.append) == EXPERTS
    assert seen
    assert set(seen) == {RECORD}


def test_a_closed_backend_has_none() -> None:
    backend = cases.random_case(FfnShape(96, 64, 2.5, "reference", "bfloat16"), 1).create()
    backend.close()
    with pytest.raises(ValueError, match="closed"):
        backend.one_token(LAYERS, EXPERTS, ROW_BYTES, False, 0)
