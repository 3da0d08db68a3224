"""What `evrun ps` shows: the launcher's knowledge, the coordinator's status and the progress records put together. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evrun.expert_worker.wire.heartbeat import Beat
from evrun.expert_worker.wire.supervision import RankStatus, Status
from evrun.launch.ranks import RUNNING, Rank
from evrun.launch.standing import Standing

SERVES = ("ready", "serving")


@dataclass(frozen=True)
class CoordinatorView:
    """The coordinator's process as the launcher sees it."""

    pid: int | None
    device: str
    incarnation: int
    reason: str
    status_age_s: float | None
    """Seconds since its last status."""


def rank_statuses(status: Status | None) -> dict[int, RankStatus]:
    """RankStatus of each rank that the coordinator told of."""
    if status is None:
        return {}
    return {told.rank: told for told in (RankStatus(*fields) for fields in status.ranks)}  # type: ignore[arg-type]


def rank_state(rank: Rank, told: RankStatus | None) -> tuple[str, str]:
    """(state, reason) of a rank, in the words of the contract."""
    if rank.state != RUNNING:
        return rank.state, rank.reason
    if told is None or told.incarnation != rank.incarnation:
        return "starting", ""
    if told.state == "down":
        # The coordinator sees a death before it is reaped here, and a start a little after it.
        return "restarting", told.reason
    return told.state, told.reason


def serves(rank: Rank, told: RankStatus | None) -> bool:
    return rank_state(rank, told)[0] in SERVES


def run_state(status: Status | None, stopping: bool) -> str:
    if stopping:
        return "stopped"
    return status.state if status is not None else "starting"


def coordinator_row(view: CoordinatorView, status: Status | None, stopping: bool) -> dict[str, Any]:
    state = run_state(status, stopping or view.pid is None)
    return {
        "role": "coordinator",
        "rank": None,
        "device": view.device,
        "pid": view.pid,
        "state": state,
        "reason": view.reason or (status.phase if status is not None and state == "starting" else ""),
        "incarnation": view.incarnation,
        "restarts": max(0, view.incarnation - 1),
        "last_layer": status.last_layer if status is not None else -1,
        "progress_age_s": None if view.status_age_s is None else round(view.status_age_s, 3),
        "resends": 0,
        "dropped_replies": 0,
        "backend": "torch",
        "rung": "",
        "bytes": {"dense": status.done_bytes} if status is not None else {},
    }


def http_row(http: Standing, pid: int | None, url: str, stopping: bool) -> dict[str, Any]:
    """The front end, in the words of the other rows; its device is its address."""
    return {
        "role": "http",
        "rank": None,
        "device": url,
        "pid": pid,
        "state": ("stopped" if stopping else "restarting") if pid is None else "ready",
        "reason": http.reason,
        "incarnation": http.incarnation,
        "restarts": max(0, http.incarnation - 1),
        "last_layer": -1,
        "progress_age_s": None,
        "resends": 0,
        "dropped_replies": 0,
        "backend": "",
        "rung": "",
        "bytes": {},
    }


def rank_row(rank: Rank, pid: int | None, device: str, told: RankStatus | None, beat: Beat | None, stopping: bool) -> dict[str, Any]:
    state, reason = rank_state(rank, told)
    if stopping and pid is None:
        state = "stopped"
    last_layer = told.last_layer if told else -1
    if beat is not None and beat.layer >= 0:
        last_layer = beat.layer  # newer than what the coordinator told
    return {
        "role": "worker",
        "rank": rank.number,
        "device": device,
        "pid": pid,
        "state": state,
        "reason": reason,
        "incarnation": rank.incarnation,
        "restarts": rank.restarts,
        "last_layer": last_layer,
        "progress_age_s": round(beat.age_s, 3) if beat is not None else None,
        "resends": told.resends if told else 0,
        "dropped_replies": told.dropped_replies if told else 0,
        "backend": told.backend if told else "",
        "rung": told.rung if told else "",
        "bytes": told.bytes if told else {},
    }
