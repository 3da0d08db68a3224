"""The expert path alone on the golden data, for a backend of a card: moe_in, expert_ids, expert_weights -> moe_routed_out."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
from cuda_cases import Make, Problem, Side, as_stored, compute
from test_native_golden import calls

from evrun.kernels.api import Dtype, FfnShape, Numerics, Row

VARIANTS: list[tuple[str, Numerics, Dtype]] = [("bf16", "reference", "bfloat16"), ("fp32noaq", "weights-only", "float32")]


def check_golden(
    make: Make, side: Side, config: str, variant: str, numerics: Numerics, dtype: Dtype, most_calls: int | None = None
) -> None:
    """fp32noaq: every call within 2e-6. bf16: of all outputs fewer than 1 in 1000 are further off than one bf16 step."""
    off = differing = total = 0
    rows: dict[tuple[int, int], Row] = {}
    for checkpoint, name, layer, x, ids, weights, expected in islice(calls(config, variant), most_calls):
        text = checkpoint.config
        shape = FfnShape(text["hidden_size"], text["moe_intermediate_size"], text["swiglu_limit"], numerics, dtype)
        experts = np.unique(ids).tolist()
        for e in experts:
            if (layer, e) not in rows:
                rows[layer, e] = checkpoint.row(layer, e)
        problem = Problem(shape, as_stored(x, shape), ids, weights, experts, [rows[layer, e] for e in experts])
        backend = make(shape, len(x), ids.shape[1], text["n_routed_experts"])
        got = compute(backend, side, problem)
        backend.close()
        if variant == "fp32noaq":
            assert np.linalg.norm(got - expected) < 2e-6 * np.linalg.norm(expected), name
        difference = np.abs(got - expected)
        off += int(np.sum(difference > bf16_step(expected)))
        differing += int(np.sum(difference > 0))
        total += expected.size
    assert total > 0
    assert off < 1e-3 * total, f"{off} of {total} outputs are off by more than a step of bf16"
    if variant == "bf16":
        assert differing < 1e-2 * total, f"{differing} of {total} outputs differ"


def bf16_step(values: Any) -> Any:
    """Distance of neighbouring bfloat16 numbers at these values."""
    return np.ldexp(np.float32(1), np.frexp(values)[1] - 8)
