"""One rank as the coordinator sees it, and when its silence means something. Pure: clocks and beats are handed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from evrun.expert_worker.wire.heartbeat import Beat
from evrun.expert_worker.wire.link import PlainAnswer
from evrun.expert_worker.wire.messages import COUNTERS


@dataclass(frozen=True)
class Deadlines:
    """Seconds without progress. Total time never counts: a slow rank that moves is well."""

    start_s: float
    first_call_s: float
    stall_s: float
    kill_s: float


@dataclass(eq=False, slots=True)
class Piece:
    """Experts of one layer call that one rank computes."""

    experts: list[int]
    causes: list[str] = field(default_factory=list)
    """Why it failed so far; the same cause twice is the request's error."""


@dataclass(eq=False, slots=True)
class InFlight:
    """A piece at a rank. Its answer must carry `sequence`."""

    piece: Piece
    sequence: int
    layer: int
    since_s: float
    abandoned: bool = False
    """Dealt again, or its request ended: the answer is dropped when it comes."""


@dataclass(eq=False, slots=True)
class Rank:
    """State of a rank. `down`: no process that can serve; `gone`: none will come by itself."""

    rank: int
    incarnation: int = 0
    pid: int = 0
    pidfd: int = -1
    state: str = "down"
    reason: str = "not started yet"
    since_s: float = 0.0
    """When the incarnation started."""
    in_flight: InFlight | None = None
    queue: deque[Piece] = field(default_factory=deque)
    calls: int = 0
    """Calls this incarnation answered."""
    last_layer: int = -1
    resends: int = 0
    dropped: int = 0
    kill_asked: bool = False
    device: str = ""
    backend: str = ""
    rung: str = ""
    answer: PlainAnswer | None = None
    """The newest, with messages.COUNTERS of its incarnation. Read where somebody asks, not at every call."""

    def bytes_by_rung(self) -> dict[str, int]:
        """The counters that count something, by name."""
        return {name: count for name, count in zip(COUNTERS, self.answer.counters, strict=True) if count} if self.answer else {}

    @property
    def live(self) -> bool:
        """Whether a new call may be dealt to it."""
        return self.state in ("ready", "serving") and not (self.in_flight and self.in_flight.abandoned)

    @property
    def free(self) -> bool:
        """Whether a piece can be handed to it now."""
        return self.live and self.in_flight is None

    def start(self, incarnation: int, pid: int, pidfd: int, now_s: float) -> None:
        """A new process: nothing of the older incarnation counts any more."""
        self.incarnation, self.pid, self.pidfd, self.since_s = incarnation, pid, pidfd, now_s
        self.state, self.reason, self.calls, self.kill_asked = "starting", "", 0, False
        self.in_flight = self.answer = None

    def stop(self, reason: str) -> list[Piece]:
        """The process is dead. Gives the pieces it still owed to a request."""
        owed = self.abandon()
        self.in_flight = None
        self.state, self.reason, self.pidfd = "down", reason, -1
        return owed

    def abandon(self) -> list[Piece]:
        """Its call is dealt again elsewhere; a late answer will be dropped. Gives the pieces it owed."""
        owed = list(self.queue)
        if self.in_flight and not self.in_flight.abandoned:
            owed.insert(0, self.in_flight.piece)
            self.in_flight.abandoned = True
        self.queue.clear()
        return owed


def silence(rank: Rank, beat: Beat | None, now_s: float) -> float:
    """Seconds since the rank last showed progress on what it owes."""
    moved = rank.in_flight.since_s if rank.in_flight else rank.since_s
    if beat and beat.incarnation == rank.incarnation:
        moved = max(moved, beat.at_s)
    return max(0.0, now_s - moved)


def verdict(rank: Rank, beat: Beat | None, deadlines: Deadlines, now_s: float) -> str:
    """`ok`, `stalled` (deal its work again), `moves` (a stalled rank came back to life) or `kill`."""
    quiet_s = silence(rank, beat, now_s)
    if rank.state == "starting":
        return "kill" if quiet_s > deadlines.start_s else "ok"
    if rank.in_flight is None:
        return "ok"
    stall_s = deadlines.stall_s if rank.calls else max(deadlines.stall_s, deadlines.first_call_s)
    if quiet_s > stall_s + deadlines.kill_s if rank.calls == 0 else quiet_s > max(stall_s, deadlines.kill_s):
        return "kill"
    if rank.state == "stalled":
        return "moves" if quiet_s <= stall_s else "ok"
    return "stalled" if quiet_s > stall_s else "ok"
