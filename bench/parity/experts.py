"""Recorded calls through real workers: every backend against the recording and against torch, N ranks against one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from evrun.bench.herd import herd
from evrun.bench.parity import stated
from evrun.bench.parity.activations import Recorded, Source
from evrun.bench.parity.backend import Backend
from evrun.bench.parity.difference import F32, Difference, Tally
from evrun.bench.parity.stated import Arithmetic
from evrun.bench.report import Row

REFERENCE = "torch"
SMALL_CACHE_BYTES = 1 << 28
"""Of a worker on a card: several of them may share one."""


def compare(sources: Sequence[Source], backends: Sequence[Backend], arithmetic: Arithmetic, worlds: Sequence[int]) -> list[Row]:
    """All recordings of one checkpoint. `worlds`: how many ranks to compare with one, each combined both ways."""
    calls = [list(source.calls()) for source in sources]
    every = [call for group in calls for call in group]
    checkpoint = sources[0].checkpoint
    rows: list[Row] = []
    results: dict[str, list[F32]] = {}
    for backend in backends:
        results[backend.name] = compute(checkpoint, backend, 1, arithmetic, "partial", every)
        at = 0
        for source, group in zip(sources, calls, strict=True):
            got = results[backend.name][at : at + len(group)]
            at += len(group)
            found = tally(group, got, [call.routed for call in group])
            row = _row("recording", source.name, backend, arithmetic, len(group), found)
            held = stated.of(source.data, arithmetic, backend.device)
            rows.append(row if held is None else row | {"stated": str(held), "holds": held.holds(found)})
    name = " + ".join(source.name for source in sources)
    for backend in backends:
        mine = results[backend.name]
        if REFERENCE in results and backend.name != REFERENCE:
            found = tally(every, mine, results[REFERENCE])
            rows.append(_row(REFERENCE, name, backend, arithmetic, len(every), found))
        for combine in ("partial", "exact") if worlds else ():
            one = mine if combine == "partial" else compute(checkpoint, backend, 1, arithmetic, combine, every)
            for world in worlds:
                found = tally(every, compute(checkpoint, backend, world, arithmetic, combine, every), one)
                row = _row(f"world 1, {combine}", name, backend, arithmetic, len(every), found) | {"world": world}
                rows.append(row if combine == "partial" else row | {"stated": "bit-equal", "holds": found.max_abs == 0})
    return rows


def compute(
    checkpoint: Path, backend: Backend, world: int, arithmetic: Arithmetic, combine: str, calls: Sequence[Recorded]
) -> list[F32]:
    """The routed sums [T, H] fp32 of the recorded calls, by `world` workers."""
    numerics, dtype = arithmetic
    options: dict[str, Any] = {"backend": backend.kernel, "devices": [backend.device] * world, "combine": combine}
    options |= {"numerics": numerics, "dtype": dtype, "chunk": max(len(call.x) for call in calls)}
    options |= {"card_cache_bytes": SMALL_CACHE_BYTES, "stall_timeout_s": 60.0, "kill_timeout_s": 120.0}
    with herd(checkpoint, world, **options) as h:
        results: list[F32] = []
        for call in calls:
            x = torch.from_numpy(call.x).to(getattr(torch, dtype))
            collect = h.experts(call.layer, x, torch.from_numpy(call.ids), torch.from_numpy(call.weights))
            results.append(collect().numpy().copy())
    return results


def tally(calls: Sequence[Recorded], got: Sequence[F32], expected: Sequence[F32]) -> Difference:
    """Over all calls."""
    found = Tally()
    for call, a, b in zip(calls, got, expected, strict=True):
        found.add(call.where, a, b)
    return found.result()


def _row(against: str, data: str, backend: Backend, arithmetic: Arithmetic, calls: int, found: Difference) -> Row:
    numerics, dtype = arithmetic
    head: Row = {"backend": backend.name, "against": against, "data": data, "numerics": numerics, "dtype": dtype, "world": 1}
    return head | {"calls": calls} | vars(found)
