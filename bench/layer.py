"""Whole layer calls through real workers: what the call costs beyond its bytes, and how several ranks share it.

Phases of a call, as the coordinator sees them: `issue` (slot written, every rank told), `wait` (until the last reply),
`sum`; `compute` is what the slowest rank says of itself. Rows that repeat are resident (page cache, or card cache);
rows that rotate through all experts are not. Floors of the same run: rows in card memory, the slowest rank's kernels alone;
registered rung, the bytes over the cards' links; arena rung, the longer of that and the copy into pinned memory.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from evrun.bench import card_kernel, link, stage
from evrun.bench.devices import CACHE, uuids
from evrun.bench.herd import Herd, herd
from evrun.bench.report import Row, timed
from evrun.coordinator import deal as dealing
from evrun.kernels import cuda
from evrun.launch.export.checkpoint import complete, write_checkpoint
from evrun.launch.export.geometry import values

EXPERTS = 128
WARM_UP = 24
ARENA_THREADS = 4
SHARED_CACHE_BYTES = 4 << 30
"""Of each worker's card cache where several share a card."""


def run(
    checkpoint: Path | None, workers: list[str], tokens: list[int], calls: int, deal: str = "sorted", only_resident: bool = False
) -> list[Row]:
    """Rows per number of tokens, residency and rung. `floor_seconds` where a card computes. only_resident: of a card's rows,
    those that stay on it."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="evrun-layer-") as folder:
        where = checkpoint or Path(folder) / "c"
        if checkpoint is None:
            config = complete(values("full-rows", n_routed_experts=EXPERTS))
            write_checkpoint(config, where)
        on_cards = any(w != "cpu" for w in workers)
        devices = [f"cuda:{uuid}" for uuid in uuids(workers)] if on_cards else workers
        floors = Floors(workers) if on_cards else None
        sharing = len(set(workers)) < len(workers)
        rows = []
        caches = (0, -1) if on_cards and not only_resident else (-1,)
        options: dict[str, Any] = {"combine": "partial", "deal": deal, "devices": devices, "chunk": max(tokens)}
        for cache in caches:
            options["card_cache_bytes"] = SHARED_CACHE_BYTES if sharing and cache else cache
            for rung in ("registered", "arena") if cache == 0 else ("registered",):
                rungs = ["arena"] if rung == "arena" else ["registered", "arena"]
                threads = ARENA_THREADS if rung == "arena" else 1
                with herd(where, len(workers), rungs=rungs, threads=threads, **options) as h:
                    for count in tokens:
                        for rotating in (False,) if only_resident else (False, True) if cache else (True,):
                            rows.append(_measure(h, count, rotating, calls, workers, cache != 0, floors, rung))
    return rows


class Floors:
    """What the cards can do at best, measured before the workers take them."""

    def __init__(self, workers: list[str]) -> None:
        cards = sorted({int(w.partition(":")[2]) for w in workers})
        self._sharing = {i: workers.count(f"cuda:{i}") for i in cards}
        rates = [float(row["gb_per_s"] or 0) * 1e9 for row in link.run(cards, ("registered",), EXPERTS)]
        self.link_bytes_s = rates[-1]
        """All cards together."""
        self._copy_bytes_s = stage.copy_rate(cards[0], ARENA_THREADS)
        self._uuid = uuids(workers[:1])[0]
        self._kernels: dict[tuple[int, int], float] = {}

    def seconds(self, tokens: int, per_rank: int, bytes_moved: float, rung: str) -> float:
        """per_rank: most experts of a rank; bytes_moved: over the links; rung: `card`, `registered` or `arena`."""
        if rung == "card":
            return self._kernel_s(tokens, per_rank)
        over_link = bytes_moved / self.link_bytes_s
        return over_link if rung == "registered" else max(over_link, bytes_moved / self._copy_bytes_s)

    def _kernel_s(self, tokens: int, experts: int) -> float:
        if (tokens, experts) not in self._kernels:
            device = cuda.CompilingDevice(self._uuid)
            row = card_kernel.run(device, [card_kernel.Case(tokens, experts)], CACHE)[0]
            device.close()
            self._kernels[tokens, experts] = float(row["seconds"] or 0)
        return self._kernels[tokens, experts]


def _measure(
    h: Herd, tokens: int, rotating: bool, calls: int, workers: list[str], cached: bool, floors: Floors | None, rung: str
) -> Row:  # fmt: skip
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
            compute.append(max(r.answer.compute_s for r in h.fleet.ranks if r.answer))
            moved.append(_bytes(h) - before)
    distinct = len(np.unique(ids.numpy()))
    floor_s = None
    if floors:
        shares = dealing.deal(np.unique(ids.numpy()).tolist(), list(range(len(workers))), h.options["deal"])
        most = max(map(len, shares.values()))
        crossed = median(moved)
        floor_s = floors.seconds(tokens, most, crossed, rung if crossed else "card")
    row = timed(
        seconds,
        floor_s,
        backend=h.fleet.ranks[0].backend,
        workers=",".join(workers),
        world=len(workers),
        tokens=tokens,
        deal=h.options["deal"],
        rung=h.fleet.ranks[0].rung + (" + card cache" if cached and workers[0] != "cpu" else ""),
        rows="rotating" if rotating else "resident",
        experts=distinct,
        bytes=distinct * config.row_bytes,
        moved_bytes=int(median(moved)),
        issue_us=median(issue) * 1e6,
        compute_us=median(compute) * 1e6,
        beyond_compute_us=median([s - c for s, c in zip(seconds, compute, strict=True)]) * 1e6,
        beyond_floor_us=None if floor_s is None else (median(seconds) - floor_s) * 1e6,
        compute_ratio=None if floor_s is None else median(compute) / floor_s,
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
