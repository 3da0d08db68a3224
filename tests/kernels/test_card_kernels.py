"""Both siblings of card kernels on a real card. Run under compute-sanitizer, this is the memory check too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

from evrun.kernels import cuda, triton
from evrun.kernels.api import Dtype, FfnShape, Numerics
from evrun.kernels.cuda import plan as cuda_plan
from evrun.kernels.cuda.driver import Device, Limits
from evrun.kernels.triton import plan as triton_plan

NONE = triton.probe() if cuda.probe() else None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NONE is not None, reason=f"no card: {NONE}")]


class CardSide:
    def __init__(self, device: Device) -> None:
        self._device, self.stream = device, device.stream()
        self._held: list[Any] = []

    def put(self, array: Any) -> int:
        array = np.ascontiguousarray(array)
        memory = self._device.allocate(array.nbytes)
        self._held.append(memory)
        self._device.copy_in(memory.address, array.ctypes.data, array.nbytes, self.stream)
        self.stream.synchronize()
        return memory.address

    def get(self, address: int, like: Any) -> Any:
        result = np.empty_like(like)
        self._device.copy_out(result.ctypes.data, address, result.nbytes, self.stream)
        self.stream.synchronize()
        return result

    def clear(self) -> None:
        for memory in self._held:
            memory.close()
        self._held.clear()


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.close()


@pytest.fixture
def side(device: Device) -> CardSide:
    return CardSide(device)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels; EVRUN_TEST_CUBINS keeps them from run to run."""
    kept = os.environ.get("EVRUN_TEST_CUBINS")
    return Path(kept) if kept else tmp_path_factory.mktemp("cubins")


@pytest.fixture(params=["cuda", "cuda on any card", "triton", "triton on any card"])
def make(request: pytest.FixtureRequest, device: Device, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Backends of both siblings, as planned for this card and with the kernels that run on every card."""
    sibling: Any = cuda if request.param.startswith("cuda") else triton
    reason = sibling.probe()
    if reason:
        pytest.skip(reason)
    own = sibling.CompilingDevice()
    if request.param == "cuda on any card":
        mine = cuda_plan.plan_multi_token
        monkeypatch.setattr(cuda_plan, "plan_multi_token", lambda s, n, limits: mine(s, n, Limits((8, 0), limits.multiprocessors, 65536)))
    elif request.param == "triton on any card":
        planned = triton_plan.make_plan
        monkeypatch.setattr(triton_plan, "make_plan", lambda *a: planned(*a[:-1], Limits((7, 5), 68, 65536)))

    def made(shape: FfnShape, max_tokens: int, top_k: int, num_experts: int) -> Any:
        return sibling.create_on(own, shape, max_tokens, top_k, folder, num_experts)

    yield made
    own.close()


def shape_of(hidden: int, intermediate: int, numerics: Numerics = "reference", dtype: Dtype = "bfloat16") -> FfnShape:
    return FfnShape(hidden, intermediate, 3.0, numerics, dtype)


@pytest.mark.parametrize(("numerics", "dtype"), VARIANTS)
@pytest.mark.parametrize("tokens", [1, 2, 37, 300])
def test_matches_the_reference(make: Make, side: CardSide, numerics: Numerics, dtype: Dtype, tokens: int) -> None:
    check_matches(make, side, shape_of(256, 128, numerics, dtype), tokens, held=3 if tokens == 1 else [1, 2, 4, 7])


@pytest.mark.parametrize(("hidden", "intermediate"), [(96, 32), (512, 288)])
@pytest.mark.parametrize("tokens", [1, 37])
def test_ragged_sizes(make: Make, side: CardSide, hidden: int, intermediate: int, tokens: int) -> None:
    check_matches(make, side, shape_of(hidden, intermediate), tokens, held=3 if tokens == 1 else [1, 2, 4, 7])


@pytest.mark.parametrize(("numerics", "dtype"), VARIANTS[:3])
@pytest.mark.parametrize(
    ("hidden", "intermediate", "held"),
    [(512, 256, 1), (512, 256, 3), (1024, 768, 2), (512, 1280, 1), (2560, 256, 5), (5120, 2304, 5)],
)
def test_one_token_in_bulk(make: Make, side: CardSide, numerics: Numerics, dtype: Dtype, hidden: int, intermediate: int, held: int) -> None:
    """Sizes that cards with an engine for bulk copies take: blocks without rows of w1, rings that go round."""
    shape = shape_of(hidden, intermediate, numerics, dtype)
    check_matches(make, side, shape, 1, top_k=5, held=held)


def test_one_token_in_bulk_at_the_edges(make: Make, side: CardSide) -> None:
    check_companions(make, side, shape_of(1024, 768), 1)
    check_extreme_scales(make, side, shape_of(512, 256, "reference", "float32"), 1)
    check_refusals(make, side, shape_of(512, 256), 1)


@pytest.mark.parametrize("tokens", [1, 37, 300])
def test_companions(make: Make, side: CardSide, tokens: int) -> None:
    check_companions(make, side, shape_of(256, 128), tokens)


def test_crowded_experts(make: Make, side: CardSide) -> None:
    check_crowded_experts(make, side, shape_of(256, 128))


@pytest.mark.parametrize("tokens", [1, 37])
def test_extreme_scales(make: Make, side: CardSide, tokens: int) -> None:
    check_extreme_scales(make, side, shape_of(256, 128, "reference", "float32"), tokens)


@pytest.mark.parametrize("tokens", [1, 37])
def test_refusals(make: Make, side: CardSide, tokens: int) -> None:
    check_refusals(make, side, shape_of(256, 128), tokens)


@pytest.mark.parametrize("config", ["minimal", "full", "long"])
@pytest.mark.parametrize(("variant", "numerics", "dtype"), card_golden.VARIANTS)
def test_golden_expert_path(make: Make, side: CardSide, config: str, variant: str, numerics: Numerics, dtype: Dtype) -> None:
    card_golden.check_golden(make, side, config, variant, numerics, dtype)
