"""The torch reference against golden activations, and what it allocates."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.kernels import registry, self_test
from evrun.kernels.api import BadScaleError, FfnShape, Row
from evrun.kernels.reference import TorchReference, quantise_e4m3

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = [
    ("minimal", "rand-24", 2), ("full", "mixed", 1), ("full", "rand-61", 9), ("long", "text-long", 6),
]  # fmt: skip
LIMIT_BYTES = 4 << 20


def matrix(random: np.random.Generator, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    return random.integers(0, 256, (n, k // 2), dtype=np.uint8), random.integers(110, 125, (n, k // 32), dtype=np.uint8)


def random_row(seed: int, hidden: int, intermediate: int) -> Row:
    random = np.random.default_rng(seed)
    return Row(*matrix(random, intermediate, hidden), *matrix(random, intermediate, hidden), *matrix(random, hidden, intermediate))


@pytest.mark.parametrize(("variant", "dtype", "numerics"), [("bf16", "bfloat16", "reference"), ("fp32noaq", "float32", "weights-only")])
@pytest.mark.parametrize(("config", "prompt", "layer"), CASES)
def test_golden_experts(config: str, prompt: str, layer: int, variant: str, dtype: Any, numerics: Any) -> None:
    checkpoint = Checkpoint.open(GOLDEN / config / "checkpoint")
    geometry = checkpoint.config
    data = load_file(GOLDEN / config / "expected" / variant / f"{prompt}.safetensors")
    x, ids = data[f"layers.{layer}.moe_in"], data[f"layers.{layer}.expert_ids"]
    if dtype == "bfloat16":
        x = torch.from_numpy(x).to(torch.bfloat16).view(torch.uint16).numpy()
    backend = TorchReference(FfnShape(geometry.hidden_size, geometry.moe_intermediate_size, geometry.swiglu_limit, numerics, dtype))
    experts = sorted(set(ids.ravel().tolist()))
    rows = [Row(*(t.data for t in checkpoint.expert(layer, e))) for e in experts]
    out = np.empty((len(x), geometry.hidden_size), np.float32)
    count = backend.call(x, ids, data[f"layers.{layer}.expert_weights"], experts, rows, out, "partial")
    expected = data[f"layers.{layer}.moe_routed_out"]
    assert count == ids.size
    if dtype == "bfloat16":
        assert (out == expected).all()
    else:
        assert np.linalg.norm(out - expected) <= 1e-6 * np.linalg.norm(expected)


def test_activation_scales_of_the_specification() -> None:
    """Spec 3.2: A = 448 -> 2^0, 449 -> 2^1, 6 -> 2^-6, 1 -> 2^-8, 0 -> 2^-22 (the smallest step is 2^-9 of it)."""
    for peak, exponent in ((448.0, 0), (449.0, 1), (6.0, -6), (1.0, -8), (0.0, -22)):
        step = 2.0 ** (exponent - 9)
        x = torch.zeros(1, 32)
        x[0, 0], x[0, 1], x[0, 2] = peak, step, step / 2 * 0.99
        q = quantise_e4m3(x)
        assert q[0, 1] == step
        assert q[0, 2] == 0


def test_nothing_large_is_allocated_for_rows_of_the_releases_size() -> None:
    """No tensor and no array above 4 MB: neither an expert nor one of its matrices ever exists expanded."""

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for item in result if isinstance(result, tuple | list) else [result]:
                if isinstance(item, torch.Tensor):
                    self.largest = max(self.largest, item.untyped_storage().nbytes())
            return result

    hidden, intermediate, tokens = 5120, 2304, 8
    backend = TorchReference(FfnShape(hidden, intermediate, 10.0, "reference", "bfloat16"))
    row = random_row(1, hidden, intermediate)
    x = torch.randn(tokens, hidden).to(torch.bfloat16).view(torch.uint16).numpy()
    ids, weights = np.zeros((tokens, 1), np.int32), np.ones((tokens, 1), np.float32)
    out = np.empty((tokens, hidden), np.float32)
    with Watch():  # whatever torch imports at its first call is not what is measured here
        backend.call(x[:1], ids[:1], weights[:1], [0], [row], out[:1], "partial")
    tracemalloc.start()
    with Watch() as watch:
        backend.call(x, ids, weights, [0], [row], out, "partial")
    _, peak = tracemalloc.get_traced_memory()  # numpy tells tracemalloc of its arrays
    tracemalloc.stop()
    assert watch.largest <= LIMIT_BYTES
    assert peak <= LIMIT_BYTES
    assert np.isfinite(out).all()


def test_a_bad_scale_is_named() -> None:
    row = random_row(2, 96, 64)
    row.s2[5, 1] = 255
    backend = TorchReference(FfnShape(96, 64, 10.0, "reference", "float32"))
    with pytest.raises(BadScaleError, match="w2, row 5") as error:
        backend.call(np.ones((1, 96), np.float32), np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32), [0], [row],
                     np.empty((1, 96), np.float32), "partial")  # fmt: skip
    assert (error.value.expert, error.value.tensor, error.value.row) == (0, "w2", 5)


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("numerics", ["reference", "weights-only"])
def test_the_self_test_passes_good_backends_and_fails_broken_ones(name: str, dtype: Any, numerics: Any) -> None:
    tiny = self_test.shape_like(FfnShape(5120, 2304, 10.0, numerics, dtype))
    backend = registry.create(name, tiny, self_test.TOKENS, 1, 1, [0])
    assert self_test.run(backend, tiny) is None

    class Broken:
        name = "broken"

        def call(self, *args: Any) -> int:
            count = backend.call(*args)
            args[5][1] *= 1.5
            return count

    assert "relative error" in str(self_test.run(Broken(), tiny))


def test_unknown_backends_list_the_known_ones() -> None:
    with pytest.raises(registry.UnknownBackendError, match="known: native, torch"):
        registry.module("cpu")
    assert registry.choose("torch") == ("torch", [])
