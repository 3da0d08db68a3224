"""What it costs to hand one token's six rows to several cards, done in three ways, and whether the bits are the same.

`fresh`    every call allocates, copies from and to pageable memory, and waits for one card before it asks the next
`in turn`  memory is there before; still one card after the other
`issued`   all cards are asked before any is waited for: what evrun's workers do
A card may be named several times: its shares then run on streams of their own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evrun.bench import report
from evrun.bench.card_kernel import DISTINCT, HIDDEN, TOP_K, Card, Inputs, Table, random_rows, shape_of
from evrun.kernels import cuda

ROUNDS, WARM_UP = 200, 20


class Share:
    """Some of the six experts on one card: a stream, kernels and buffers of their own."""

    def __init__(self, card: Card, experts: list[int], cache: Path) -> None:
        self.card, self.device, self.experts = card, card.device, experts
        self.device.use()
        self._backend = cuda.create_on(self.device, shape_of(), 1, TOP_K, cache, 384)
        self.stream = self.device.stream()
        self._tables = [card.table(range(s * DISTINCT, s * DISTINCT + TOP_K)) for s in range(8)]
        self._turn = 0
        inputs = Inputs(card, 1, "bfloat16", TOP_K)
        self._x, self._routes = inputs.x, [float(inputs.weights[0, e]) for e in experts]
        self._pinned_x, self._pinned_out = self.device.pinned(self._x.nbytes), self.device.pinned(HIDDEN * 4)
        self._card_x, self._card_out = self.device.allocate(self._x.nbytes), self.device.allocate(HIDDEN * 4)
        self._pinned_x.array[:] = self._x.view(np.uint8).reshape(-1)

    def fresh(self) -> Any:
        self.device.use()
        x, out, result = self.device.allocate(self._x.nbytes), self.device.allocate(HIDDEN * 4), np.empty(HIDDEN, np.float32)
        self.device.copy_in(x.address, self._x.ctypes.data, self._x.nbytes, self.stream)
        self._launch(x.address, out.address)
        self.device.copy_out(result.ctypes.data, out.address, result.nbytes, self.stream)
        self.stream.synchronize()
        x.close()
        out.close()
        return result

    def issue(self) -> None:
        self.device.use()
        self.device.copy_in(self._card_x.address, self._pinned_x.address, self._x.nbytes, self.stream)
        self._launch(self._card_x.address, self._card_out.address)
        self.device.copy_out(self._pinned_out.address, self._card_out.address, HIDDEN * 4, self.stream)

    def drain(self) -> Any:
        self.device.use()
        self.stream.synchronize()
        return self._pinned_out.array.view(np.float32)

    def close(self) -> None:
        self._backend.check()
        self._backend.close()
        for memory in (self._pinned_x, self._pinned_out, self._card_x, self._card_out):
            memory.close()

    def _launch(self, x: int, out: int) -> None:
        table: Table = self._tables[self._turn]
        self._turn = (self._turn + 1) % len(self._tables)
        self._backend.call_single(self.stream, x, table.rows[self.experts], self._routes, out, "partial")


def run(uuids: Sequence[str], cache: Path) -> list[report.Row]:
    """Rows: way and shares, six rows on the first card alone among them. `same_bits`: as the sum of the first way."""
    cards: dict[str, Card] = {}
    rows = random_rows()
    for uuid in uuids:
        if uuid not in cards:
            cards[uuid] = Card(cuda.CompilingDevice(uuid), rows)
    results = _measure([Share(cards[uuids[0]], list(range(TOP_K)), cache)])
    if len(uuids) > 1:
        results += _measure([Share(cards[uuid], list(range(i, TOP_K, len(uuids))), cache) for i, uuid in enumerate(uuids)])
    for card in cards.values():
        card.device.use()
        card.close()
    return results


def _measure(shares: list[Share]) -> list[report.Row]:
    def fresh() -> list[Any]:
        return [share.fresh() for share in shares]

    def in_turn() -> list[Any]:
        results = []
        for share in shares:
            share.issue()
            results.append(share.drain())
        return results

    def issued() -> list[Any]:
        for share in shares:
            share.issue()
        return [share.drain() for share in shares]

    rows: list[report.Row] = []
    first: Any = None
    for name, way in (("fresh", fresh), ("in turn", in_turn), ("issued", issued)):
        seconds, same = [], True
        for i in range(ROUNDS + WARM_UP):
            started = time.perf_counter()
            parts = way()
            ended = time.perf_counter()
            total = parts[0].copy()
            for part in parts[1:]:
                total += part
            first = total if first is None else first
            same = same and bool(np.array_equal(first, total))
            if i >= WARM_UP:
                seconds.append(ended - started)
        deal = "/".join(str(len(share.experts)) for share in shares)
        rows.append(report.timed(seconds, way=name, rows=deal, tokens=1, same_bits=str(same).lower()))
    for share in shares:
        share.close()
    return rows
