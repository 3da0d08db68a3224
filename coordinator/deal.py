"""Which rank computes which experts of a call: a pure function of the call's ids, the live ranks and the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

Deal = Callable[[list[int], Sequence[int]], dict[int, list[int]]]


def sorted_deal(experts: list[int], live: Sequence[int]) -> dict[int, list[int]]:
    """Round-robin over the live ranks: one token over four ranks gives 2, 2, 1, 1."""
    count = len(live)
    return {rank: experts[place::count] for place, rank in enumerate(live[: len(experts)])}


def home_deal(experts: list[int], live: Sequence[int]) -> dict[int, list[int]]:
    """An expert always goes to the same rank while the live ranks stay the same, so that a card cache can hit."""
    dealt: dict[int, list[int]] = {}
    for expert in experts:
        dealt.setdefault(live[expert % len(live)], []).append(expert)
    return {rank: dealt[rank] for rank in live if rank in dealt}


POLICIES: Mapping[str, Deal] = {"sorted": sorted_deal, "home": home_deal}


def deal(ids: Iterable[int], live: Sequence[int], policy: str) -> dict[int, list[int]]:
    """{rank: its expert ids, ascending}, ranks ascending; ranks without an expert are left out.

    ids   the expert ids of the call, in any order, with repetitions
    live  the ranks that can take a call, ascending; at least one
    """
    assert live, "a deal needs a live rank"
    return POLICIES[policy](sorted(set(ids)), live)
