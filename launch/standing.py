"""A process besides the workers that is replaced when it dies: which incarnation it is, and when the next one is due. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from evrun.launch import policy
from evrun.launch.policy import Death, GiveUp


@dataclass
class Standing:
    """The coordinator of a served run, or its front end."""

    name: str
    incarnation: int = 0
    """Of the newest process; 0 before the first."""
    reason: str = ""
    """Of its newest death; empty while a process runs."""
    due_at_s: float | None = None
    """Monotonic time of the next start; None while a process runs, or none will."""
    served: bool = False
    """Whether this incarnation has done what it is for."""
    _deaths: list[Death] = field(default_factory=list)

    def start(self) -> int:
        """A process is about to be started; its incarnation."""
        self.incarnation += 1
        self.reason, self.due_at_s, self.served = "", None, False
        return self.incarnation

    def is_due(self, now_s: float) -> bool:
        return self.due_at_s is not None and now_s >= self.due_at_s

    def die(self, now_s: float, exit_code: int | None, words: str) -> GiveUp | None:
        """Its process is gone. None: a start is due; else why there will be none."""
        self.reason = words
        self._deaths.append(Death(now_s, int(self.served), exit_code, words))
        verdict = policy.decide(self._deaths)
        if isinstance(verdict, GiveUp):
            return verdict
        if self.served:
            self._deaths.clear()
        self.due_at_s = now_s + verdict.after_s
        return None
