"""What the launcher knows of one rank over all its incarnations: pure, no process in sight.

starting a process -> died -> policy: restart after s | failed | lost
held (by `evrun kill --hold`) until `revive`; failed and lost too
"""

from __future__ import annotations

from dataclasses import dataclass, field

from evrun.launch import policy
from evrun.launch.policy import Death

RUNNING, WAITING, HELD, FAILED, LOST = "running", "restarting", "stopped", "failed", "lost"


@dataclass
class Rank:
    """One rank. `state` is one of the above; while it is `running` the coordinator knows better what that means."""

    number: int
    incarnation: int = 0
    """Of the newest process; 0 before the first."""
    state: str = WAITING
    reason: str = ""
    restart_at_s: float = 0.0
    """Monotonic; meant while restarting."""
    deaths: list[Death] = field(default_factory=list)
    hold: bool = False
    """After its death the rank stays down."""
    replace: bool = False
    """Its end was asked for: start a new process at once and hold the death against nobody."""

    @property
    def restarts(self) -> int:
        return max(0, self.incarnation - 1)

    def is_due(self, now_s: float) -> bool:
        return self.state == WAITING and now_s >= self.restart_at_s

    def start(self) -> int:
        """A process is about to be started; its incarnation."""
        assert self.state == WAITING
        self.incarnation += 1
        self.state, self.reason, self.replace = RUNNING, "", False
        return self.incarnation

    def die(self, death: Death) -> bool:
        """Its process is gone; whether a restart follows by itself."""
        assert self.state == RUNNING
        self.reason = death.reason
        if self.replace:
            self._wait(death.at_s)
            return True
        if self.hold:
            self.state, self.reason = HELD, f"held down until `evrun restart {self.number}`; it {death.reason}"
            return False
        self.deaths.append(death)
        verdict = policy.decide(self.deaths)
        if isinstance(verdict, policy.GiveUp):
            self.state, self.reason = verdict.state, verdict.reason
            return False
        if death.calls:
            self.deaths.clear()  # nothing before a served call counts any more
        self._wait(death.at_s + verdict.after_s)
        return True

    def keep_down(self) -> None:
        """Hold the rank: at its next death, or now when it has no process."""
        self.hold = True
        if self.state == WAITING:
            self.state, self.reason = HELD, f"held down until `evrun restart {self.number}`"

    def revive(self, now_s: float) -> None:
        """Start it anew as if nothing had happened; a running process must end first and is then replaced."""
        self.hold = False
        self.deaths.clear()
        if self.state == RUNNING:
            self.replace = True
        else:
            self._wait(now_s)

    def _wait(self, until_s: float) -> None:
        self.state, self.restart_at_s = WAITING, until_s
