"""The expert path alone on the golden data: moe_in, expert_ids, expert_weights -> moe_routed_out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import native_cases as cases
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from evrun.kernels.api import FfnShape, Row

GOLDEN = Path(__file__).parents[1] / "golden"
CONFIGS = ["minimal", "full", "long"]


class Checkpoint:
    """Raw bytes of a tiny checkpoint's tensors."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())["text_config"]
        self._folder = folder
        self._files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]

    def row(self, layer: int, expert: int) -> Row:
        prefix = f"layers.{layer}.ffn.experts.{expert}."
        return Row(*(self._tensor(f"{prefix}{w}.{part}") for w in ("w1", "w3", "w2") for part in ("weight", "scale")))

    def _tensor(self, name: str) -> npt.NDArray[np.uint8]:
        raw = np.fromfile(self._folder / self._files[name], np.uint8)
        header = int(raw[:8].view(np.uint64)[0])
        entry = json.loads(raw[8 : 8 + header].tobytes())[name]
        start, end = entry["data_offsets"]
        tensor: npt.NDArray[np.uint8] = raw[8 + header + start : 8 + header + end].reshape(entry["shape"]).copy()
        return tensor


def calls(config: str, variant: str) -> Any:
    """(checkpoint, name, layer, moe_in, ids, weights, moe_routed_out) of every recorded expert layer, prefill and decode."""
    checkpoint = Checkpoint(GOLDEN / config / "checkpoint")
    for file in sorted((GOLDEN / config / "expected" / variant).glob("*.safetensors")):
        data = load_file(file)
        for name in data:
            if name.endswith("moe_in"):
                prefix = name.removesuffix("moe_in")
                layer = int(prefix.split("layers.")[1].split(".")[0])
                parts = [data[prefix + part] for part in ("moe_in", "expert_ids", "expert_weights", "moe_routed_out")]
                yield (checkpoint, f"{file.stem} {prefix}", layer, *parts)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("variant", "numerics", "dtype"), [("bf16", "reference", "bfloat16"), ("fp32noaq", "weights-only", "float32")])
def test_golden_expert_path(config: str, variant: str, numerics: Any, dtype: Any) -> None:
    seen = 0
    kept: dict[tuple[int, int], Row] = {}
    for checkpoint, name, layer, x, ids, weights, expected in calls(config, variant):
        text = checkpoint.config
        shape = FfnShape(text["hidden_size"], text["moe_intermediate_size"], text["swiglu_limit"], numerics, dtype)
        experts = np.unique(ids).tolist()
        for e in experts:
            if (layer, e) not in kept:
                kept[layer, e] = checkpoint.row(layer, e)
        rows = [kept[layer, e] for e in experts]
        case = cases.Case(shape, cases.stored(x, shape), ids, weights, experts, rows)
        for kernel in cases.VARIANTS:
            got = case.run(case.create(2, kernel))
            if variant == "bf16":
                # The recorded sum went on to the shared expert in fp32: no rounding after it.
                np.testing.assert_array_equal(got, expected, err_msg=name)
            else:
                assert np.linalg.norm(got - expected) < 1e-6 * np.linalg.norm(expected), name
        seen += 1
    assert seen >= 4
