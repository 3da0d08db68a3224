"""The Triton kernels' own source in Triton's interpreter, against the torch reference.

From the plan to the launches everything is what runs on a card. What this cannot show is the card's own arithmetic,
bfloat16 operands and speed: see `test_card_kernels.py`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import card_golden
import numpy as np
import pytest
from cuda_cases import (
    VARIANTS,
    Make,
    check_companions,
    check_crowded_experts,
    check_extreme_scales,
    check_matches,
    check_refusals,
)
from host_memory import HostSide
from triton_host import AMPERE, TURING, HostCard

from evrun.kernels.api import Dtype, FfnShape, Numerics
from evrun.kernels.cuda.driver import Limits
from evrun.kernels.triton import plan
from evrun.kernels.triton.backend import TritonBackend

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, where a card goes on silently
]


@pytest.fixture
def side() -> HostSide:
    return HostSide()


def maker(limits: Limits = AMPERE) -> Make:
    return lambda *geometry: TritonBackend(HostCard(limits), *geometry, Path())


def shape_of(hidden: int, intermediate: int, numerics: Numerics = "reference", dtype: Dtype = "bfloat16") -> FfnShape:
    return FfnShape(hidden, intermediate, 3.0, numerics, dtype)


@pytest.mark.parametrize(("numerics", "dtype"), [VARIANTS[0], VARIANTS[3]])
@pytest.mark.parametrize("tokens", [1, 21])
def test_matches_the_reference(side: HostSide, numerics: Numerics, dtype: Dtype, tokens: int) -> None:
    """K without a whole chunk, tiles that reach past the last row and the last token."""
    held = 3 if tokens == 1 else [1, 2, 4, 7]
    check_matches(maker(), side, shape_of(96, 96, numerics, dtype), tokens, held=held)


@pytest.mark.long
@pytest.mark.parametrize(("numerics", "dtype"), [VARIANTS[0], VARIANTS[3]])
def test_tiles_without_tensor_cores(side: HostSide, numerics: Numerics, dtype: Dtype) -> None:
    check_matches(maker(TURING), side, shape_of(64, 32, numerics, dtype), 9, held=[1, 2, 4, 7])


@pytest.mark.long
@pytest.mark.parametrize(("numerics", "dtype"), VARIANTS)
@pytest.mark.parametrize("tokens", [1, 37])
def test_whole_chunks(side: HostSide, numerics: Numerics, dtype: Dtype, tokens: int) -> None:
    held = 3 if tokens == 1 else [1, 2, 4, 7]
    check_matches(maker(), side, shape_of(512, 256, numerics, dtype), tokens, held=held)


@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.long), pytest.param(21, marks=pytest.mark.slow)])
def test_companions(side: HostSide, tokens: int) -> None:
    check_companions(maker(), side, shape_of(64, 32), tokens)


@pytest.mark.long
@pytest.mark.parametrize("tokens", [1, 21])
def test_extreme_scales(side: HostSide, tokens: int) -> None:
    check_extreme_scales(maker(), side, shape_of(64, 32, "reference", "float32"), tokens)


@pytest.mark.long
@pytest.mark.parametrize("tokens", [1, 21])
def test_refusals(side: HostSide, tokens: int) -> None:
    check_refusals(maker(), side, shape_of(64, 64), tokens)


@pytest.mark.long
def test_crowded_experts(side: HostSide) -> None:
    check_crowded_experts(maker(), side, shape_of(64, 32))


@pytest.mark.long
@pytest.mark.parametrize(("variant", "numerics", "dtype"), card_golden.VARIANTS)
def test_golden_expert_path(side: HostSide, variant: str, numerics: Numerics, dtype: Dtype) -> None:
    card_golden.check_golden(maker(), side, "minimal", variant, numerics, dtype, most_calls=3)


def test_call_out_of_bounds(side: HostSide) -> None:
    backend = maker()(shape_of(64, 32), 2, 3, 8)
    with pytest.raises(ValueError, match="3 tokens on a backend made for 1 to 2"):
        backend.call(side.stream, 3, 0, 0, 0, 0, 0, 1, 0, "partial")


def test_the_grid_has_a_tile_for_every_pair() -> None:
    random = np.random.default_rng(1)
    for tokens, top_k, held, width in [(2, 3, 8, 16), (40, 6, 3, 16), (300, 6, 24, 64), (1000, 2, 5, 64)]:
        for skew in (1.0, 8.0):
            chances = np.arange(1, held + top_k + 1) ** -skew
            ids = [random.choice(held + top_k, top_k, replace=False, p=chances / chances.sum()) for _ in range(tokens)]
            counts = np.bincount(np.concatenate(ids), minlength=held)[:held]
            assert (-(-counts // width)).sum() <= plan.token_tiles(tokens, top_k, held, width)


def test_tile_width_follows_from_the_tokens_of_a_call_alone() -> None:
    made = plan.make_plan(shape_of(5120, 2304), 6, 384, AMPERE)
    assert [made.tilings_for(tokens)[-1].width for tokens in (2, 1024, 1025, 4096)] == [16, 16, 64, 64]
    assert len(made.units(1)) < len(made.units(2)) < len(made.units(1025))
