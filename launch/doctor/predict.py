"""How long a token takes, from bytes over measured rates. Pure: everything it depends on is in `Inputs`, and so in the JSON.

A decode step is layers x (attention and the rest of the dense tree + the longer of shared expert and routed experts) + head.
Processes that share a core take turns on it; routed rows that are not in memory are read first. A prefill does the same
for chunks of tokens, of which each reads every weight once.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from evrun.launch.doctor.rates import Rate, Rates


@dataclass(frozen=True)
class Place:
    """Where one rank runs."""

    device: str
    """`cpu` or `cuda:GPU-<uuid>`."""
    cores: tuple[int, ...]


@dataclass(frozen=True)
class Inputs:
    """Work, places and rates."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    row_bytes: int
    attention_bytes: int
    """Dense weights of all layers that a token reads, without shared experts."""
    shared_bytes: int
    head_bytes: int
    coordinator_cores: tuple[int, ...]
    ranks: tuple[Place, ...]
    resident: float
    """Share of the routed rows that will be in memory, 0 to 1."""
    registered: float
    """Share of the routed rows whose shards fit the pin budget."""
    prompt_tokens: int
    prefill_chunk: int
    rates: Rates

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Prediction:
    """Milliseconds per token, and what they consist of."""

    decode_ms: float
    prefill_ms: float
    decode_parts_ms: dict[str, float]
    prefill_parts_ms: dict[str, float]


def predict(i: Inputs) -> Prediction:
    """Decode: the step after a prompt. Prefill: the whole prompt, per token of it."""
    decode = step_seconds(i, 1)
    chunk = min(i.prefill_chunk, i.prompt_tokens)
    passes = math.ceil(i.prompt_tokens / chunk)
    prefill = {part: s * passes / i.prompt_tokens for part, s in step_seconds(i, i.prompt_tokens / passes).items()}
    return Prediction(
        sum(decode.values()) * 1e3,
        sum(prefill.values()) * 1e3,
        {part: s * 1e3 for part, s in decode.items()},
        {part: s * 1e3 for part, s in prefill.items()},
    )


def step_seconds(i: Inputs, tokens: float) -> dict[str, float]:
    """Seconds of one pass of `tokens` tokens by part: attention, experts (shared and routed, side by side), disk, calls, head."""
    r = i.rates
    moe, disk = _moe_seconds(i, tokens)
    payload = tokens * i.hidden * (2 + 4 * 2 * len(i.ranks)) / r.copy_bytes_per_s if tokens > 1 else 0.0
    return {
        "attention": r.attention.seconds(i.attention_bytes, tokens),
        "experts": i.layers * moe,
        "disk": i.layers * disk,
        "calls": i.layers * (r.call_s + payload),
        "head": r.head.seconds(i.head_bytes, 1),
    }


def distinct_experts(experts: int, top_k: int, tokens: float) -> float:
    """Expected number of experts that a pass needs, with every token drawing `top_k` of them evenly."""
    return experts * (1 - math.pow(1 - top_k / experts, tokens))


def _moe_seconds(i: Inputs, tokens: float) -> tuple[float, float]:
    """(shared and routed experts of one layer, reading what is not in memory) of one pass."""
    rows = distinct_experts(i.experts, i.top_k, tokens)
    per_row = max(1.0, tokens * i.top_k / rows)
    busy: defaultdict[object, float] = defaultdict(float)
    shared = i.rates.shared.seconds(i.shared_bytes / i.layers, tokens)
    for core in i.coordinator_cores:
        busy[core] += shared  # its threads work side by side: each core is busy all the while
    for rank, place in enumerate(i.ranks):
        mine = _dealt(rows, rank, len(i.ranks))
        if place.device == "cpu":
            for core in place.cores:
                busy[core] += _cpu_seconds(i, mine / len(place.cores), per_row)
        else:
            busy[place.device] += card_seconds(i, place.device, mine, per_row)
    cold = rows * i.row_bytes * (1 - i.resident)
    disk = cold / i.rates.cold_bytes_per_s if cold and i.rates.cold_bytes_per_s else 0.0
    return max(busy.values()), disk


def _dealt(rows: float, rank: int, world: int) -> float:
    """Rows that the rank gets of a call: round-robin."""
    whole = math.floor(rows)
    return whole // world + (rank < whole % world) if rows == whole else rows / world


def _cpu_seconds(i: Inputs, rows: float, tokens_a_row: float) -> float:
    """On one core. The rate was measured with `expert_cores` at once."""
    rate = i.rates.experts
    assert rate is not None, "CPU ranks are measured when there are any"
    return rate.seconds(i.row_bytes, tokens_a_row) * rows * i.rates.expert_cores


def card_seconds(i: Inputs, device: str, rows: float, tokens_a_row: float) -> float:
    """Rows over the link, but for those in the card cache, then the kernels."""
    card = i.rates.cards[device.partition(":")[2]]
    cached = min(1.0, card.cache_bytes / (i.layers * i.experts * i.row_bytes))
    fast, slow = card.registered_bytes_per_s, card.arena_bytes_per_s
    by_registered = i.registered if fast else 0.0
    link = 0.0
    if fast and by_registered:
        link += by_registered / fast
    if by_registered < 1:
        link += (1 - by_registered) / (slow or fast or math.inf)
    return rows * (i.row_bytes * (1 - cached) * link + card.experts.seconds(i.row_bytes, tokens_a_row))


def _faster(rate: Rate, factor: float) -> Rate:
    return Rate(rate.single_bytes_per_s * factor, rate.pass_bytes_per_s * factor, rate.token_bytes_per_s * factor)


def what_helps(i: Inputs) -> list[dict[str, str | float]]:
    """Changes to the machine or the plan by what they would save of a decode step, most first. Empty when nothing is worth 2 %."""
    r = i.rates
    changes: dict[str, Callable[[], Inputs]] = {
        "twice as fast a dense tree (cores for the coordinator, or a card for it)": lambda: dataclasses.replace(
            i,
            rates=dataclasses.replace(r, attention=_faster(r.attention, 2), shared=_faster(r.shared, 2), head=_faster(r.head, 2)),
        ),
    }
    if i.resident < 1:
        changes["memory for all routed experts"] = lambda: dataclasses.replace(i, resident=1.0)
        changes["a disk twice as fast"] = lambda: dataclasses.replace(
            i, rates=dataclasses.replace(r, cold_bytes_per_s=r.cold_bytes_per_s and 2 * r.cold_bytes_per_s)
        )
    if r.experts is not None and any(p.device == "cpu" for p in i.ranks):
        faster = _faster(r.experts, 2)
        changes["twice the cores for CPU workers"] = lambda: dataclasses.replace(i, rates=dataclasses.replace(r, experts=faster))
    if any(p.device != "cpu" for p in i.ranks):
        changes["twice the link rate of every card"] = lambda: dataclasses.replace(i, rates=_faster_links(r))
        if i.registered < 1:
            changes["a pin budget for every shard (--pin-budget, ulimit -l)"] = lambda: dataclasses.replace(i, registered=1.0)
    now = predict(i).decode_ms
    after = {name: predict(make()).decode_ms for name, make in changes.items()}
    return [
        {"change": name, "decode_ms": ms, "saves_percent": 100 * (1 - ms / now)}
        for name, ms in sorted(after.items(), key=lambda item: item[1])
        if ms < 0.98 * now
    ]


def _faster_links(r: Rates) -> Rates:
    cards = {
        uuid: dataclasses.replace(
            card,
            registered_bytes_per_s=card.registered_bytes_per_s and 2 * card.registered_bytes_per_s,
            arena_bytes_per_s=card.arena_bytes_per_s and 2 * card.arena_bytes_per_s,
        )
        for uuid, card in r.cards.items()
    }
    return dataclasses.replace(r, cards=cards)


@dataclass(frozen=True)
class Fit:
    """Whether the plan fits this machine's memory."""

    verdict: str
    """`fits` (all routed experts in memory), `streams` (some come from disk) or `no`."""
    needed_bytes: int
    """Without the routed experts: dense tree, processes, slots, decode state."""
    experts_bytes: int
    available_bytes: int
    resident: float
    """Share of the routed experts that memory can hold."""
    reason: str


def fit(needs: Mapping[str, int], experts_bytes: int, available_bytes: int) -> Fit:
    """needs: bytes by what takes them. `available_bytes` counts page cache as free: rows that lie in it do not come on top."""
    needed = sum(needs.values())
    room = available_bytes - needed
    listed = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in needs.items())
    if room < 0:
        short = f"{needed / 2**30:.2f} GiB needed ({listed}), {available_bytes / 2**30:.2f} GiB available"
        return Fit("no", needed, experts_bytes, available_bytes, 0.0, short)
    share = min(1.0, room / experts_bytes)
    both = f"{listed}; routed experts {experts_bytes / 2**30:.2f} GiB in {room / 2**30:.2f} GiB of room"
    return Fit("fits" if share >= 1 else "streams", needed, experts_bytes, available_bytes, share, both)
