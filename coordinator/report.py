"""The build report: what will run, read off what the workers said of themselves. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from evrun.coordinator.rank import Rank


def experts_line(ranks: Sequence[Rank], num_layers: int, deal: str, combine: str) -> str:
    """`routed experts: world 4 [cpu native-avx2] on 40 layers, deal sorted, combine partial, rung in-place`."""
    serving = [r for r in ranks if r.live or r.state == "stalled"]
    kinds = _counted([r.backend for r in serving])
    rungs = _counted([r.rung for r in serving])
    world = str(len(ranks)) if len(serving) == len(ranks) else f"{len(serving)} of {len(ranks)}"
    return f"routed experts: world {world} [{kinds}] on {num_layers} layers, deal {deal}, combine {combine}, rung {rungs}"


def missing_lines(ranks: Sequence[Rank]) -> list[str]:
    """One line for each rank that does not serve."""
    return [f"rank {r.rank} does not serve: {r.state}, {r.reason}" for r in ranks if not r.live and r.state != "stalled"]


def _counted(names: Sequence[str]) -> str:
    """`a` when all are equal, else `3 x a, 1 x b`."""
    kinds = sorted(set(names))
    return kinds[0] if len(kinds) == 1 else ", ".join(f"{names.count(k)} x {k}" for k in kinds) or "none"
