"""What happens to ranks while calls are in flight, as `Fleet.pump` tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from evrun.coordinator.rank import InFlight, Piece
from evrun.expert_worker.wire.link import PlainAnswer
from evrun.expert_worker.wire.messages import Failed


class Answered(NamedTuple):
    """A rank answered its call. `message` is None when the answer was damaged."""

    rank: int
    flight: InFlight
    message: PlainAnswer | Failed | None


@dataclass(frozen=True)
class Lost:
    """A rank died or stalled; `pieces` is what it owed."""

    rank: int
    pieces: list[Piece]
    dead: bool


@dataclass(frozen=True)
class Crashed:
    """How a dead incarnation ended, known once it is reaped. `pieces`: what it owed when it died."""

    rank: int
    pieces: list[Piece]
    reason: str


Event = Answered | Lost | Crashed
