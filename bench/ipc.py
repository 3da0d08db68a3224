"""One layer call with an empty kernel: the way to N workers and back, sum included, for both transports."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from evrun.bench.herd import herd
from evrun.bench.report import Row, timed
from evrun.expert_worker.wire.link import TRANSPORTS
from evrun.launch.export.checkpoint import complete, write_checkpoint
from evrun.launch.export.geometry import values

HIDDEN, EXPERTS, TOP_K, LAYER = 5120, 32, 6, 0
WARM_UP = 300


def run(worlds: list[int], calls: int) -> list[Row]:
    """Rows: transport, workers, median and 99th percentile over `calls` calls of one token with H = 5120."""
    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="evrun-bench-") as folder:
        geometry = {"hidden_size": HIDDEN, "moe_intermediate_size": 32, "num_hidden_layers": 3, "engram_layer_ids": ()}
        config = complete(values("tiny", n_routed_experts=EXPERTS, num_experts_per_tok=TOP_K, **geometry))
        write_checkpoint(config, Path(folder) / "c")
        x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
        ids, weights = torch.arange(TOP_K, dtype=torch.int32)[None] * 5, torch.full((1, TOP_K), 0.25)
        for world in worlds:
            for transport in TRANSPORTS:
                with herd(Path(folder) / "c", world, transport=transport, backend="empty", combine="partial") as h:
                    seconds = []
                    for i in range(calls + WARM_UP):
                        started = time.perf_counter()
                        h.experts(LAYER, x, ids, weights)()
                        if i >= WARM_UP:
                            seconds.append(time.perf_counter() - started)
                rows.append(timed(seconds, transport=transport, world=world, tokens=1))
    return rows
