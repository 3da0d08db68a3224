"""What follows a worker's death: pure, from the deaths of its rank so far.

Back-off and cap look only at deaths of incarnations that served no call, and only at those since one last did: a rank
that works and is killed again and again comes back at once, one that cannot start is left alone after a few tries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evrun.expert_worker.wire import errors

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 10.0
MAX_FRUITLESS = 5
"""Incarnations in a row that served no call, then the rank is failed."""
HOPELESS = {
    errors.USAGE: "refused what it was started with",
    errors.CHECKPOINT: "refused the checkpoint",
}
"""Exit codes that a restart cannot change."""


@dataclass(frozen=True)
class Death:
    """One incarnation that ended without being asked to."""

    at_s: float
    """Monotonic."""
    calls: int
    """Layer calls it served."""
    exit_code: int | None
    """None when a signal killed it."""
    reason: str
    """For people: `killed by SIGKILL`, `exited with 3: ...`."""


@dataclass(frozen=True)
class Restart:
    after_s: float


@dataclass(frozen=True)
class GiveUp:
    state: str
    """`failed`, or `lost` when its device is gone."""
    reason: str


def decide(deaths: Sequence[Death]) -> Restart | GiveUp:
    """The newest death is the last of `deaths`, which holds at least one."""
    newest = deaths[-1]
    if newest.exit_code == errors.DEVICE:
        return GiveUp("lost", newest.reason)
    if newest.exit_code in HOPELESS:
        return GiveUp("failed", f"{HOPELESS[newest.exit_code]}: {newest.reason}")
    fruitless = 0
    for death in reversed(deaths):
        if death.calls:
            break
        fruitless += 1
    if fruitless == 0:
        return Restart(0.0)
    if fruitless >= MAX_FRUITLESS:
        return GiveUp("failed", f"{fruitless} incarnations in a row served no call; the last {newest.reason}")
    return Restart(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (fruitless - 1)))
