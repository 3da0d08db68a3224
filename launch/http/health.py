"""Whether a token can be produced now: judged from progress, never from existence. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SERVES = ("ready", "serving")
LAUNCHER_WITHIN_S = 5.0
COORDINATOR_WITHIN_S = 5.0
"""An idle coordinator speaks several times a second."""


@dataclass(frozen=True)
class Seen:
    """What is known of the run at one moment."""

    look: dict[str, Any] | None
    """The newest answer of the launcher to control.Look."""
    look_age_s: float
    layer_age_s: float | None
    """Since some rank last finished a layer call; None before the first."""
    draining: bool
    lost: bool = False
    """Connections to the coordinator that the launcher tells of have just broken: its death is not reaped yet."""


@dataclass(frozen=True)
class Health:
    """`body` is the JSON of /health; `code` names the obstacle for errors of other endpoints."""

    status: int
    body: dict[str, Any]
    code: str = ""
    message: str = ""
    degraded: list[dict[str, Any]] = field(default_factory=list)

    @property
    def serves(self) -> bool:
        return self.status == 200


def judge(seen: Seen, stall_s: float, stuck_s: float) -> Health:
    """200 when a request would be served, else 503.

    stall_s  a rank whose record stands still for longer does not count
    stuck_s  a running request may go without a finished layer for so long
    """
    look = seen.look
    if seen.draining or (look is not None and look["ps"]["state"] == "stopped"):
        return _no("stopping", "the server is stopping", {})
    if look is None or seen.look_age_s > LAUNCHER_WITHIN_S:
        return _no("unknown", "the launcher does not answer", {})
    coordinator, *rows = look["ps"]["processes"]
    ranks = [row for row in rows if row["role"] == "worker"]
    lacking = [_lack(row, stall_s) for row in ranks]
    missing = [lack for lack in lacking if lack is not None]
    requests = {"running": look["requests_running"], "waiting": look["requests_waiting"]}
    facts: dict[str, Any] = {
        "ranks": {"serving": len(ranks) - len(missing), "asked": len(ranks)},
        "requests": requests,
        "last_layer": coordinator["last_layer"],
        "last_layer_age_s": None if seen.layer_age_s is None else round(seen.layer_age_s, 3),
        "coordinator_age_s": coordinator["progress_age_s"],
    }
    if missing:
        facts["degraded"] = missing
    if seen.lost:
        return _no("coordinator_lost", "the coordinator is gone; it is being replaced", facts)
    if coordinator["state"] not in SERVES:
        return _loading(look, coordinator, facts)
    if len(missing) == len(ranks):
        return _no("no_rank", "no rank serves now: " + "; ".join(f"rank {m['rank']} {m['state']}" for m in missing), facts)
    age_s = coordinator["progress_age_s"]
    if requests["running"]:
        quiet_s = min(x for x in (age_s, seen.layer_age_s) if x is not None)
        if quiet_s > stuck_s:
            return _no("stuck", f"a request runs and no layer was finished for {quiet_s:.0f} s", facts)
    elif age_s is None or age_s > COORDINATOR_WITHIN_S:
        return _no("stuck", "the coordinator shows no sign of life", facts)
    return Health(200, {"status": "degraded" if missing else "ok", **facts}, degraded=missing)


def _loading(look: dict[str, Any], coordinator: dict[str, Any], facts: dict[str, Any]) -> Health:
    done, total = look["done_bytes"], look["total_bytes"]
    progress = {"phase": look["phase"], "done_bytes": done, "total_bytes": total, "progress": round(done / total, 4) if total else None}
    facts = {**facts, "loading": progress}
    if coordinator["reason"] and coordinator["pid"] is None:
        return _no("coordinator_lost", f"the coordinator {coordinator['reason']}; it is being replaced", facts)
    return _no("loading", f"loading: {look['phase']}", facts)


def _lack(row: dict[str, Any], stall_s: float) -> dict[str, Any] | None:
    """Why a rank does not count as serving; None when it does."""
    if row["state"] not in SERVES:
        return {"rank": row["rank"], "state": row["state"], "reason": row["reason"]}
    age_s = row["progress_age_s"]
    if age_s is None or age_s > stall_s:
        return {"rank": row["rank"], "state": "stalled", "reason": f"no progress for {age_s or 0:.1f} s"}
    return None


def _no(code: str, message: str, facts: dict[str, Any]) -> Health:
    return Health(503, {"status": code, "message": message, **facts}, code, message)
