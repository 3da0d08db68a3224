"""Whole layer calls through real workers: what the call costs beyond its bytes, and how several ranks share it.

Phases of a call, as the coordinator sees them: `issue` (slot written, every rank told), `wait` (until the last reply),
`sum`; `compute` is what the slowest rank says of itself. Rows that repeat are resident (page cache, or card cache);
rows that rotate through all experts are not.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from evrun.bench.herd import Herd, herd
from evrun.bench.report import Row, timed
from evrun.kernels.cuda import driver
from evrun.launch.export.checkpoint import complete, write_checkpoint
from evrun.launch.export.geometry import values

WARM_UP = 8


def run(checkpoint: Path | None, workers: list[str], tokens: list[int], calls: int) -> list[Row]:
    """Rows per number of tokens and residency. `floor_seconds` for rows that are not resident on a card: bytes over the link."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="evrun-layer-") as folder:
        where = checkpoint or Path(folder) / "c"
        if checkpoint is None:
            config = complete(values("full-rows", n_routed_experts=64))
            write_checkpoint(config, where)
        devices = _devices(workers)
        rows = []
        caches = (0, -1) if any(d != "cpu" for d in devices) else (-1,)
        for cache in caches:
            for rung in ("registered", "arena") if cache == 0 else ("registered",):
                options: dict[str, Any] = {"combine": "partial", "devices": devices, "chunk": max(tokens), "card_cache_bytes": cache}
                rungs = ["arena"] if rung == "arena" else ["registered", "arena"]
                threads = 4 if rung == "arena" else 1
                with herd(where, len(workers), rungs=rungs, threads=threads, **options) as h:
                    for count in tokens:
                        for rotating in (False, True) if cache else (True,):
                            rows.append(_measure(h, count, rotating, calls, workers, cached=cache != 0))
    return rows


def _devices(workers: list[str]) -> list[str]:
    uuids = driver.device_uuids() if any(w != "cpu" for w in workers) else []
    return [w if w == "cpu" else f"cuda:{uuids[int(w.partition(':')[2])]}" for w in workers]


def _measure(h: Herd, tokens: int, rotating: bool, calls: int, workers: list[str], cached: bool) -> Row:
    config = h.checkpoint.config
    random = np.random.default_rng(tokens)
    x = torch.from_numpy(random.standard_normal((tokens, config.hidden_size)).astype(np.float32)).to(torch.bfloat16)
    seconds, issue, compute, moved = [], [], [], []
    for i in range(calls + WARM_UP):
        ids, weights = _route(config.n_routed_experts, config.num_experts_per_tok, tokens, i if rotating else 0)
        before = _bytes(h)
        started = time.perf_counter()
        collect = h.experts(1, x, ids, weights)
        issued = time.perf_counter()
        collect()
        ended = time.perf_counter()
        if i >= WARM_UP:
            seconds.append(ended - started)
            issue.append(issued - started)
            compute.append(max(r.compute_s for r in h.fleet.ranks))
            moved.append(_bytes(h) - before)
    distinct = len(np.unique(ids.numpy()))
    row = timed(
        seconds,
        backend=h.fleet.ranks[0].backend,
        workers=",".join(workers),
        world=len(workers),
        tokens=tokens,
        rung=h.fleet.ranks[0].rung + (" + card cache" if cached and workers[0] != "cpu" else ""),
        rows="rotating" if rotating else "resident",
        experts=distinct,
        bytes=distinct * config.row_bytes,
        moved_bytes=int(median(moved)),
        issue_us=median(issue) * 1e6,
        compute_us=median(compute) * 1e6,
        beyond_compute_us=median([s - c for s, c in zip(seconds, compute, strict=True)]) * 1e6,
    )
    return row


def _route(experts: int, top_k: int, tokens: int, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: `top_k` experts, the next ones at every turn. More: random draws, other ones at every turn."""
    if tokens == 1:
        chosen = (np.arange(top_k) + turn * top_k) % experts
        ids = np.sort(chosen)[None]
    else:
        random = np.random.default_rng(turn)
        ids = np.stack([random.permutation(experts)[:top_k] for _ in range(tokens)])
    return torch.from_numpy(ids.astype(np.int32)), torch.full(ids.shape, 1.5 / top_k)


def _bytes(h: Herd) -> int:
    """Bytes that crossed the link, all ranks."""
    return sum(r.bytes_by_rung().get(rung, 0) for r in h.fleet.ranks for rung in ("registered", "arena"))
