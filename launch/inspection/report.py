"""What an inspection found: checks with one of three outcomes each. Pure data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["pass", "fail", "undecided"]
"""`undecided`: what the check is about is not there yet, for instance while it is being downloaded."""


@dataclass(frozen=True)
class Check:
    """One question about the checkpoint and its answer."""

    name: str
    subject: str
    """The file, group or tensor that it is about."""
    outcome: Outcome
    found: str
    """In a few words."""
    problems: list[str] = field(default_factory=list)
    """Whole lines: where, expected, found, what to do."""
    notes: list[str] = field(default_factory=list)
    """What is odd and does no harm."""


@dataclass
class Report:
    """Every check, in the order of the questions."""

    directory: str
    checks: list[Check] = field(default_factory=list)
    groups: list[dict[str, str | int]] = field(default_factory=list)
    """Tensors and bytes by group, found and expected."""
    payload: dict[str, Any] | None = None
    """Totals of `--deep`."""

    def add(
        self, name: str, subject: str, outcome: Outcome, found: str, problems: list[str] | None = None, notes: list[str] | None = None
    ) -> None:
        self.checks.append(Check(name, subject, outcome, found, problems or [], notes or []))

    def counts(self) -> dict[Outcome, int]:
        outcomes: tuple[Outcome, ...] = ("pass", "fail", "undecided")
        return {outcome: sum(c.outcome == outcome for c in self.checks) for outcome in outcomes}

    @property
    def verdict(self) -> Outcome:
        """`fail` when anything fails, else `undecided` when anything is undecided."""
        counts = self.counts()
        return "fail" if counts["fail"] else "undecided" if counts["undecided"] else "pass"

    def require_complete(self) -> None:
        """What is undecided fails."""
        self.checks = [dataclasses.replace(c, outcome="fail") if c.outcome == "undecided" else c for c in self.checks]

    def to_json(self) -> dict[str, Any]:
        return {
            "directory": self.directory,
            "verdict": self.verdict,
            "counts": self.counts(),
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "groups": self.groups,
            "payload": self.payload,
        }
