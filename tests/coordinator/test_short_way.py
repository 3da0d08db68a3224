"""One token's layer call the short way (link.Round), and back to the ordinary one whenever something is not plain."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from test_expert_client import CASE, FULL, LAYER, fault

from evrun.bench.herd import Herd, herd
from evrun.coordinator import fleet
from evrun.coordinator.expert_client import CancelledError
from evrun.expert_worker.wire.heartbeat import read

TOKENS = len(CASE.ids)


@pytest.fixture(autouse=True)
def nothing_else_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every call that finds the last look older than TICK_S goes the ordinary way."""
    monkeypatch.setattr(fleet, "TICK_S", 30.0)


class Counted:
    """A herd whose short sends and short ends are counted."""

    def __init__(self, h: Herd) -> None:
        self.herd, self.sent, self.ended = h, 0, 0
        send, finish = h.fleet.send, h.fleet.finish

        def counted_send(*arguments: Any) -> bool:
            went = send(*arguments)
            self.sent += went
            return went

        def counted_finish(out: int) -> Any:
            pieces = finish(out)
            self.ended += not pieces
            return pieces

        h.fleet.send, h.fleet.finish = counted_send, counted_finish  # type: ignore[method-assign]

    def token(self, number: int, layer: int = LAYER) -> np.ndarray:
        t = slice(number, number + 1)
        return self.herd.experts(layer, CASE.x[t], CASE.ids[t], CASE.weights[t])().numpy().copy()


@contextmanager
def counted(world: int, **options: Any) -> Iterator[Counted]:
    with herd(FULL, world, **options) as h:
        h.fleet.pump(0.0)  # the first look
        yield Counted(h)


@pytest.mark.parametrize("deal", ["sorted", "home"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_exact_rows_have_the_bits_of_the_reference(world: int, deal: str) -> None:
    with counted(world, deal=deal) as c:
        for number in range(TOKENS):
            assert (c.token(number) == CASE.expected[number : number + 1]).all()
        assert c.ended == c.sent >= TOKENS - 1
        assert sum(rank.calls for rank in c.herd.fleet.ranks) >= TOKENS
        assert {rank.last_layer for rank in c.herd.fleet.ranks if rank.calls} == {LAYER}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("combine", ["exact", "partial"])
def test_the_short_way_and_the_ordinary_one_give_the_same_bits(combine: str, dtype: torch.dtype) -> None:
    name = "bfloat16" if dtype == torch.bfloat16 else "float32"
    with herd(FULL, 3, combine=combine, dtype=name) as h:
        c = Counted(h)
        h.fleet.pump(0.0)
        x = CASE.x.to(dtype)
        short = [h.experts(LAYER, x[i : i + 1], CASE.ids[i : i + 1], CASE.weights[i : i + 1])().clone() for i in range(8)]
        assert c.ended >= 7
        h.fleet.round = None
        for i in range(8):
            assert torch.equal(short[i], h.experts(LAYER, x[i : i + 1], CASE.ids[i : i + 1], CASE.weights[i : i + 1])())
        assert c.ended <= 8


@pytest.mark.parametrize("combine", ["exact", "partial"])
@pytest.mark.parametrize("do", ["nan", "malformed", "twice", "rows"])
def test_a_damaged_reply_is_dealt_again(do: str, combine: str) -> None:
    with counted(3, combine=combine, faults=[fault(do, call=4)]) as c:
        calm = [c.token(number) for number in range(2)]
        for number in (0, 1, 0, 1):
            assert (c.token(number) == calm[number]).all()
        rank = c.herd.fleet.ranks[1]
        assert rank.dropped <= 1 if do == "twice" else rank.dropped == 1
        assert rank.resends == c.herd.experts.resends == (do != "twice")
        assert c.ended >= (c.sent - 1) > 0


@pytest.mark.parametrize("at", ["receive", "read", "compute", "write"])
def test_a_death_costs_a_resend(at: str) -> None:
    with counted(3, faults=[fault("die", at, call=3)]) as c:
        for number in range(6):
            assert (c.token(number) == CASE.expected[number : number + 1]).all()
        assert c.sent > c.ended
        assert c.herd.fleet.ranks[1].resends == 1
        assert c.herd.fleet.live() == [0, 2]


def test_a_stalled_rank_is_dealt_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "TICK_S", 0.05)
    with counted(2, stall_timeout_s=0.3) as c:
        c.token(0)
        c.herd.signal(0, signal.SIGSTOP)
        assert (c.token(1) == CASE.expected[1:2]).all()
        assert c.herd.fleet.ranks[0].state == "stalled"
        c.herd.signal(0, signal.SIGCONT)
        deadline = time.monotonic() + 10
        while 0 not in c.herd.fleet.live():
            c.token(2)
            assert time.monotonic() < deadline
        assert (c.token(3) == CASE.expected[3:4]).all()


def test_a_cancelled_or_abandoned_call_is_forgotten() -> None:
    with counted(2, faults=[fault("stall", "read", call=3, ms=300)]) as c:
        for number in range(2):
            c.token(number)
        collect = c.herd.experts(LAYER, CASE.x[2:3], CASE.ids[2:3], CASE.weights[2:3])
        c.herd.experts.cancelled = lambda: True
        with pytest.raises(CancelledError):
            collect()
        c.herd.experts.cancelled = lambda: False
        c.herd.experts.abandon()
        for number in range(3, 6):
            assert (c.token(number) == CASE.expected[number : number + 1]).all()
        deadline = time.monotonic() + 10
        while c.herd.fleet.ranks[1].dropped == 0:
            c.herd.fleet.pump(0.05)
            assert time.monotonic() < deadline
        assert c.herd.fleet.live() == [0, 1]
        assert c.herd.experts.resends == 0


def test_rows_that_are_not_laid_out_plainly_go_the_ordinary_way() -> None:
    with counted(2) as c:
        c.token(0)
        sent = c.sent
        wide = torch.stack([CASE.x[:1], CASE.x[:1]], dim=-1)[..., 0]
        assert not wide.is_contiguous()
        out = c.herd.experts(LAYER, wide, CASE.ids[:1], CASE.weights[:1])().numpy()
        assert (out == CASE.expected[:1]).all()
        assert c.sent == sent


def test_a_token_of_another_size_is_never_sent() -> None:
    with counted(2) as c:
        c.token(0)
        sent = c.sent
        for x, ids, weights in (
            (CASE.x[:1, 1:].contiguous(), CASE.ids[:1], CASE.weights[:1]),
            (CASE.x[:1], CASE.ids[:1, 1:].contiguous(), CASE.weights[:1]),
            (CASE.x[:1], CASE.ids[:1], CASE.weights[:1, 1:].contiguous()),
        ):
            with pytest.raises((RuntimeError, ValueError)):
                c.herd.experts(LAYER, x, ids, weights)
            c.herd.experts.abandon()
        assert c.sent == sent
        assert (c.token(0) == CASE.expected[:1]).all()


def test_what_must_be_looked_at_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "TICK_S", 0.0)  # a look is always due
    with counted(2) as c:
        for number in range(3):
            assert (c.token(number) == CASE.expected[number : number + 1]).all()
        assert c.sent == 0


def test_a_worker_that_serves_without_python_counts_and_shows_progress_as_before() -> None:
    with counted(2) as c:
        for number in (0, 1, 0, 1, 0, 1):
            assert (c.token(number) == CASE.expected[number : number + 1]).all()
        for rank, reply in zip(c.herd.fleet.ranks, c.herd.fleet.replies, strict=True):
            deadline = time.monotonic() + 10
            while (beat := read(reply.record)) and beat.state == "serving":  # said after the answer
                assert time.monotonic() < deadline
            assert beat
            assert (beat.calls, beat.state, beat.layer) == (rank.calls, "ready", LAYER) == (6, "ready", LAYER)
            assert rank.bytes_by_rung() == {"in-place": 6 * CASE.ids.shape[1] // 2 * c.herd.checkpoint.config.row_bytes}
