from __future__ import annotations

import time

import pytest

from evrun.expert_worker.wire.heartbeat import Beat
from evrun.expert_worker.wire.supervision import RankStatus, Status
from evrun.launch import status
from evrun.launch.commands.ps import COLUMNS, cells
from evrun.launch.ranks import Rank
from evrun.launch.status import CoordinatorView


def told(incarnation: int = 1, state: str = "ready", reason: str = "") -> RankStatus:
    return RankStatus(0, incarnation, state, reason, 4, 9, 2, 3, "cpu", "torch", "in-place", {"in-place": 5}, 70)


def rank(state: str = "running", incarnation: int = 1, reason: str = "") -> Rank:
    return Rank(0, incarnation=incarnation, state=state, reason=reason)


@pytest.mark.parametrize(
    ("known", "word", "expected"),
    [
        (rank(), None, "starting"),
        (rank(incarnation=2), told(1, "serving"), "starting"),
        (rank(), told(state="stalled", reason="no progress for 2.1 s in layer 4"), "stalled"),
        (rank(), told(state="down", reason="died"), "restarting"),
        (rank("restarting", reason="killed by SIGKILL"), told(state="serving"), "restarting"),
        (rank("failed"), told(), "failed"),
        (rank("lost"), told(), "lost"),
        (rank("stopped"), told(), "stopped"),
    ],
)
def test_the_state_of_a_rank(known: Rank, word: RankStatus | None, expected: str) -> None:
    assert status.rank_state(known, word)[0] == expected


def test_the_record_is_newer_than_the_coordinators_word() -> None:
    beat = Beat(1, 70, "serving", 100, 6, 3, 10, time.monotonic() - 1.5)
    row = status.rank_row(rank(), 70, "cpu", told(state="serving"), beat, stopping=False)
    assert row["last_layer"] == 6
    assert row["progress_age_s"] >= 1.5
    assert (row["resends"], row["dropped_replies"], row["bytes"], row["restarts"]) == (2, 3, {"in-place": 5}, 0)


def test_before_anybody_said_anything() -> None:
    row = status.rank_row(rank(incarnation=1), 70, "cpu", None, None, stopping=False)
    assert (row["state"], row["last_layer"], row["progress_age_s"], row["backend"], row["bytes"]) == ("starting", -1, None, "", {})
    assert len(cells(row)) == len(COLUMNS)
    first = status.coordinator_row(CoordinatorView(5, "cpu", 1, "", None), None, stopping=False)
    assert (first["state"], first["rank"], first["progress_age_s"]) == ("starting", None, None)
    assert len(cells(first)) == len(COLUMNS)


def test_while_it_stops() -> None:
    word = Status("serving", "serving a request", 1, 2, 1.0, 1, 0, 4, [], [])
    assert status.run_state(word, stopping=True) == "stopped"
    assert status.coordinator_row(CoordinatorView(None, "cpu", 1, "killed by SIGKILL", 0.1), word, stopping=False)["state"] == "stopped"
    assert status.rank_row(rank("restarting"), None, "cpu", told(), None, stopping=True)["state"] == "stopped"
