"""Scripted histories of deaths, without a process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evrun.launch import policy
from evrun.launch.policy import Death, GiveUp, Restart
from evrun.launch.ranks import FAILED, HELD, LOST, RUNNING, WAITING, Rank


def death(calls: int = 0, code: int | None = None, at_s: float = 0.0) -> Death:
    return Death(at_s, calls, code, "killed by SIGKILL" if code is None else f"exited with {code}: why")


def test_waits_double_until_the_cap() -> None:
    found = [policy.decide([death()] * n) for n in range(1, 6)]
    assert found[:4] == [Restart(0.1), Restart(0.2), Restart(0.4), Restart(0.8)]
    assert found[4] == GiveUp("failed", "5 incarnations in a row served no call; the last killed by SIGKILL")


def test_a_served_call_forgives_what_was_before() -> None:
    assert policy.decide([death()] * 4 + [death(calls=1)]) == Restart(0.0)
    assert policy.decide([death()] * 4 + [death(calls=1), death()]) == Restart(0.1)


@pytest.mark.parametrize(("code", "state"), [(4, "lost"), (3, "failed"), (2, "failed")])
def test_what_a_restart_cannot_change(code: int, state: str) -> None:
    found = policy.decide([death(calls=9, code=code)])
    assert isinstance(found, GiveUp)
    assert found.state == state
    assert f"exited with {code}: why" in found.reason


@given(st.lists(st.integers(0, 1), min_size=1, max_size=40))
def test_waits_are_bounded_and_only_fruitless_rows_give_up(calls: list[int]) -> None:
    found = policy.decide([death(calls=c) for c in calls])
    row = len(calls) - max((i + 1 for i, c in enumerate(calls) if c), default=0)
    assert isinstance(found, GiveUp) == (row >= policy.MAX_FRUITLESS)
    if isinstance(found, Restart):
        assert found.after_s == (0 if row == 0 else min(policy.LONGEST_WAIT_S, policy.FIRST_WAIT_S * 2 ** (row - 1)))


@given(st.lists(st.sampled_from(["die", "serve and die", "hold", "revive", "lose"]), max_size=60))
def test_a_rank_is_always_in_one_known_state(script: list[str]) -> None:
    rank, now_s, starts = Rank(0), 0.0, 0
    for step in script:
        now_s += 20.0  # longer than any wait
        if rank.is_due(now_s):
            starts += 1
            assert rank.start() == starts
        before = rank.state
        if step == "hold":
            rank.keep_down()
        elif step == "revive":
            rank.revive(now_s)
            assert rank.state in (RUNNING, WAITING)
        elif rank.state == RUNNING:
            held, replaced = rank.hold, rank.replace
            returns = rank.die(death(calls=step == "serve and die", code=4 if step == "lose" else None, at_s=now_s))
            assert returns == (rank.state == WAITING)
            if replaced:
                assert rank.is_due(now_s)
            elif held:
                assert rank.state == HELD
            elif step == "lose":
                assert rank.state == LOST
        assert rank.state in (RUNNING, WAITING, HELD, FAILED, LOST)
        assert rank.incarnation == starts
        if before in (FAILED, LOST) and step != "revive":
            assert rank.state == before


def test_a_replacement_is_nobodys_fault() -> None:
    rank = Rank(0)
    for _ in range(20):
        rank.start()
        rank.revive(1.0)
        assert rank.die(death(code=4, at_s=2.0))
    assert rank.restarts == 19
    assert rank.deaths == []
