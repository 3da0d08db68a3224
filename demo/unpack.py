"""A checkpoint in the release's format -> parameters to train on from: the inverse of `export`.

Every parameter has the value that its packed form stands for; packed again it has the same values.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from evrun.demo.parameters import EXPERT_WEIGHTS, Parameters, expert_weight
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint, Tensor
from evrun.expert_worker.wire.checkpoint.schema import other_specs
from evrun.kernels import formats

_PLACES = {"w1": 0, "w3": 2, "w2": 4}
"""Of a weight in `Checkpoint.expert`; its scales follow."""


def unpack(directory: Path) -> Parameters:
    """fp32, by the names of `parameters`. Raises CheckpointError."""
    checkpoint = Checkpoint.open(directory)
    config = checkpoint.config
    found: Parameters = {}
    for name, (dtype, _) in other_specs(config).items():
        if not name.endswith(".scale"):
            tensor = checkpoint.tensor(name)
            values = _dequantised(checkpoint, name) if dtype == "F8_E4M3" else _plain(tensor)
            found[name] = torch.from_numpy(np.array(values, np.float32)).view(tensor.shape)
    for layer in range(config.num_hidden_layers):
        experts = [checkpoint.expert(layer, e) for e in range(config.n_routed_experts)]
        for part in EXPERT_WEIGHTS:
            at = _PLACES[part]
            rows = [formats.dequantise_fp4_rows(expert[at].data, expert[at + 1].data) for expert in experts]
            found[expert_weight(layer, part)] = torch.from_numpy(np.stack(rows))
    return found


def _dequantised(checkpoint: Checkpoint, name: str) -> npt.NDArray[np.float32]:
    codes, scales = checkpoint.tensor(name), checkpoint.tensor(f"{name.removesuffix('.weight')}.scale")
    by_rows = name.endswith(".engram.embed.weight")
    return (formats.dequantise_fp8_rows if by_rows else formats.dequantise_fp8_tiles)(codes.data, scales.data)


def _plain(tensor: Tensor) -> npt.NDArray[np.float32]:
    raw = np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8)
    return formats.bfloat16_bits_to_float32(raw.view(np.uint16)) if tensor.dtype == "BF16" else raw.view(np.float32)
