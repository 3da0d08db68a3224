"""The CUDA kernels on a real card. Run under compute-sanitizer, this is the memory check too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

from evrun.kernels import cuda
from evrun.kernels.api import Dtype, FfnShape, Numerics
from evrun.kernels.cuda import plan
from evrun.kernels.cuda.backend import CudaBackend
from evrun.kernels.cuda.driver import Limits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda.probe() is not None, reason=f"no card: {cuda.probe()}")]


class CardSide:
    def __init__(self, device: cuda.CompilingDevice) -> None:
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
def device() -> Iterator[cuda.CompilingDevice]:
    device = cuda.CompilingDevice()
    yield device
    device.close()


@pytest.fixture
def side(device: cuda.CompilingDevice) -> CardSide:
    return CardSide(device)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels; EVRUN_TEST_CUBINS keeps them from run to run."""
    kept = os.environ.get("EVRUN_TEST_CUBINS")
    return Path(kept) if kept else tmp_path_factory.mktemp("cubins")


@pytest.fixture(params=["own", "any card"])
def make(request: pytest.FixtureRequest, device: cuda.CompilingDevice, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Backends as planned for this card, and with the kernels that run on every card."""
    if request.param == "any card":
        own = plan.plan_multi_token
        monkeypatch.setattr(plan, "plan_multi_token", lambda s, n, limits: own(s, n, Limits((8, 0), limits.multiprocessors, 65536)))

    def made(shape: FfnShape, max_tokens: int, top_k: int, num_experts: int) -> CudaBackend:
        return cuda.create_on(device, shape, max_tokens, top_k, folder, num_experts)

    return made


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
