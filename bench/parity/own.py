"""Recordings made here, for where there are no golden ones: a small random checkpoint and what the torch backend computes on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from evrun.bench.herd import herd
from evrun.bench.parity.activations import Source
from evrun.bench.parity.stated import Arithmetic
from evrun.launch.export.checkpoint import complete, write_checkpoint
from evrun.launch.export.geometry import values

LAYERS, EXPERTS, TOKENS = 3, 24, (1, 17)


def record(folder: Path, arithmetic: Arithmetic) -> Source:
    """A checkpoint in `folder` with six experts a token, and one file of calls over it."""
    size = {"hidden_size": 128, "moe_intermediate_size": 96, "n_routed_experts": EXPERTS, "num_experts_per_tok": 6}
    write_checkpoint(complete(values("tiny", num_hidden_layers=LAYERS, **size)), folder / "checkpoint")
    random = np.random.default_rng(0)
    numerics, dtype = arithmetic
    data: dict[str, torch.Tensor] = {}
    with herd(folder / "checkpoint", 1, backend="torch", numerics=numerics, dtype=dtype, combine="partial", chunk=max(TOKENS)) as h:
        for prefix, tokens in (("", TOKENS[1]), ("greedy.", TOKENS[0])):
            for layer in range(LAYERS):
                x = torch.from_numpy(random.standard_normal((tokens, 128)).astype(np.float32)).to(getattr(torch, dtype))
                chosen = np.stack([random.permutation(EXPERTS)[:6] for _ in range(tokens)]).astype(np.int32)
                weights = torch.from_numpy(random.uniform(0.1, 0.5, chosen.shape).astype(np.float32))
                out = h.experts(layer, x, torch.from_numpy(chosen), weights)()
                name = f"{prefix}layers.{layer}"
                data |= {f"{name}.moe_in": x.float(), f"{name}.expert_ids": torch.from_numpy(chosen)}
                data |= {f"{name}.expert_weights": weights, f"{name}.moe_routed_out": out.clone()}
    save_file(data, folder / "own.safetensors")
    return Source(folder / "checkpoint", "own", (folder / "own.safetensors",))
