"""The workers as the coordinator sees them: one wait for messages, deaths, stalls and the launcher's word.

Deaths are seen here first (pidfds in the same wait as the replies), so that a call is dealt again at once and not when
the launcher has reaped the process. Everything that happens becomes an Event; who deals and combines is elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from evrun.coordinator.events import Answered, Crashed, Event, Lost
from evrun.coordinator.rank import Deadlines, InFlight, Piece, Rank, silence, verdict
from evrun.coordinator.spec import CoordinatorSpec
from evrun.expert_worker.wire import heartbeat, supervision
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.exchange import MOST_RANKS
from evrun.expert_worker.wire.hub import Hub
from evrun.expert_worker.wire.link import PlainAnswer, open_group
from evrun.expert_worker.wire.messages import Call, Failed, Hello, Partial, Ready, Stop, codec
from evrun.expert_worker.wire.slots import CallMemory, ReplyMemory, SlotLayout

TICK_S = 0.05
"""Longest wait between two looks at the progress records while a call is in flight."""
STATUS_EVERY_S = 0.25
log = logging.getLogger("fleet")


class Sent(NamedTuple):
    """A call on its way through the short way."""

    dealt: dict[int, list[int]]
    layer: int
    sequence: int
    """Of the first rank; the others' follow."""
    since_s: float


class ShutdownError(Exception):
    """The launcher asked the coordinator to end, or is gone."""


class Fleet:
    """All ranks. Belongs to the coordinator's main thread."""

    def __init__(self, spec: CoordinatorSpec, config: ModelConfig) -> None:
        self._spec = spec
        self.layout = SlotLayout.of(config, spec.world_size, spec.prefill_chunk, spec.dtype, spec.combine)
        self.calls = CallMemory(self.layout, spec.call_fd, writable=True)
        self.replies = [ReplyMemory(self.layout, fd, writable=True) for fd in spec.reply_fds]
        self.ranks = [Rank(r) for r in range(spec.world_size)]
        self._deadlines = Deadlines(spec.start_timeout_s, spec.first_call_timeout_s, spec.stall_timeout_s, spec.kill_timeout_s)
        self._hub = Hub(spec.hub_address, spec.run_id, spec.secret)
        bells = list(zip(spec.request_bell_fds, spec.reply_bell_fds, strict=True))
        self._group = open_group(spec.transport, self._hub, spec.run_id, self.calls, self.replies, bells)
        self.round = self._group.round
        self._launcher = socket.socket(fileno=os.dup(spec.supervision_fd))
        self._sent: Sent | None = None
        self._owed_at_death: dict[tuple[int, int], list[Piece]] = {}
        self._sequence = 0
        self._others = select.epoll()
        """Everything that is no reply bell: one descriptor, so that a wait for replies can end for it."""
        self._poll = select.poll()
        self._others_fd = self._others.fileno()
        self._poll.register(self._others_fd, select.POLLIN)
        self._watched: dict[int, Callable[[], None]] = {}
        self.watch(self._hub.fd, self._hub_stirs)
        self.watch(spec.lifeline_fd, self._launcher_gone)
        self._launcher_stirs = True
        self.watch(self._launcher.fileno(), self._launcher_speaks)
        for fd in self._group.fds():
            self._poll.register(fd, select.POLLIN)
        self._look_at = 0.0
        self._pidfds: dict[int, int] = {}
        self._status_at = 0.0
        self.status: Callable[[], supervision.Status] | None = None
        """Makes the coordinator's status; sent when something changed and every STATUS_EVERY_S."""
        self.changed = True

    def watch(self, fd: int, stirs: Callable[[], None]) -> None:
        """Let `pump` end its wait when fd is readable; `stirs` is called then."""
        self._watched[fd] = stirs
        self._others.register(fd, select.EPOLLIN)

    def live(self) -> list[int]:
        return [r.rank for r in self.ranks if r.live]

    def settled(self) -> bool:
        """Whether every rank either said ready or will not come by itself."""
        return all(r.live or r.state == "gone" for r in self.ranks)

    def hopeless(self) -> bool:
        """Whether no rank serves and none will come by itself."""
        return all(r.state == "gone" for r in self.ranks)

    def submit(self, pieces: Sequence[tuple[int, Piece]], layer: int, slot: int, tokens: int) -> None:
        """Hand pieces to free ranks, one each. A rank that cannot be reached is one whose death will be noted."""
        now_s = time.monotonic()
        calls = []
        for number, piece in pieces:
            rank = self.ranks[number]
            self._sequence += 1
            call = Call(self._spec.run_id, rank.incarnation, self._sequence, layer, slot, tokens, piece.experts, self._spec.check_payload)
            rank.in_flight = InFlight(piece, self._sequence, layer, now_s)
            rank.state, rank.last_layer = "serving", layer
            calls.append((number, call))
        self._group.submit(calls)
        self._report(now_s)  # here, while the ranks serve

    def send(self, dealt: dict[int, list[int]], layer: int, slot: int, x: int, ids: int, weights: int) -> bool:
        """Hand one token's call to these free ranks the short way (link.Round): what is asked lies at these addresses.

        False, and nothing is done, when there is none or anything else is to be done first. Otherwise `finish` follows.
        """
        now_s = time.monotonic()
        busy = self._hub.may_have or self._launcher_stirs or now_s - self._look_at >= TICK_S or self._must_report(now_s)
        if self.round is None or busy or len(dealt) > MOST_RANKS or self._spec.check_payload:
            return False
        batch = [len(dealt), self._sequence + 1, layer, slot]
        for number, experts in dealt.items():
            batch += (number, self.ranks[number].incarnation, len(experts), *experts)
        self._sent = Sent(dealt, layer, self._sequence + 1, now_s)
        self._sequence += len(dealt)
        self.round.send(batch, x, ids, weights)
        return True

    def finish(self, out: int) -> dict[int, Piece]:
        """Wait for what was sent and put its sum to this address: [H] fp32. When anything is not as it should be, the pieces
        that are now in flight at their ranks as after `submit`; nothing of their answers is lost."""
        sent, short = self._sent, self.round
        assert sent is not None, "finish comes once after send"
        assert short is not None
        if not (short.wait(self._others_fd, int(TICK_S * 1000)) and short.sum(out)):
            return self._unfold()
        self._sent = None
        for number in sent.dealt:
            rank = self.ranks[number]
            rank.last_layer = sent.layer
            self._settle(rank, short.answers[number])
        return {}

    def _unfold(self) -> dict[int, Piece]:
        """What was sent the short way goes on as an ordinary call."""
        sent, self._sent = self._sent, None
        if sent is None:
            return {}
        pieces = {number: Piece(experts) for number, experts in sent.dealt.items()}
        for sequence, (number, piece) in enumerate(pieces.items(), sent.sequence):
            rank = self.ranks[number]
            rank.in_flight = InFlight(piece, sequence, sent.layer, sent.since_s)
            rank.state, rank.last_layer = "serving", sent.layer
        return pieces

    def pump(self, timeout_s: float) -> list[Event]:
        """Everything that happened; waits up to `timeout_s` when nothing has. Raises ShutdownError."""
        waiting = [r.rank for r in self.ranks if r.in_flight]
        busy = bool(waiting) or any(r.state == "starting" for r in self.ranks)
        wait_s = 0.0 if self._hub.may_have or self._launcher_stirs else min(timeout_s, TICK_S if busy else STATUS_EVERY_S)
        events: list[Event] = []
        if wait_s and waiting:
            answers = self._gather(waiting, wait_s)
            if answers is not None:
                events, wait_s = answers, 0.0
        now_s = time.monotonic()
        due = busy and now_s - self._look_at >= TICK_S
        if events and not due:
            return events
        ready = {fd for fd, _ in self._poll.poll(wait_s * 1000)}
        if self._others_fd in ready:
            ready |= {fd for fd, _ in self._others.poll(0)}
        for fd in ready:
            if fd in self._watched:
                self._watched[fd]()
        # What a process said before it died counts: messages first, then deaths. Those messages may bring a restart, whose
        # pidfd takes the number of one that is closed: so the dead are noted by incarnation before.
        dead = [(rank, rank.incarnation) for rank in (self.ranks[self._pidfds[fd]] for fd in ready & self._pidfds.keys())]
        events += self._take(ready)
        for rank, incarnation in dead:
            if rank.incarnation == incarnation:
                events += self._died(rank)
        now_s = time.monotonic()
        if busy and now_s - self._look_at >= TICK_S:
            self._look_at = now_s
            events += self._look(now_s)
        self._report(now_s)
        return events

    def _gather(self, waiting: list[int], timeout_s: float) -> list[Event] | None:
        """The answers of all ranks that owe one, if they are plain; none of them if something else comes first, which is left
        where it is. None: they cannot be waited for together."""
        ranks = [self.ranks[number] for number in waiting]
        flights = [rank.in_flight for rank in ranks if rank.in_flight and not rank.in_flight.abandoned]
        if len(flights) < len(ranks):
            return None
        answers = self._group.gather(array("i", waiting), self._others_fd, timeout_s)
        if not answers:
            return answers if answers is None else []
        for rank, answer in zip(ranks, answers, strict=True):
            self._settle(rank, answer)
        return [Answered(rank.rank, flight, answer) for rank, flight, answer in zip(ranks, flights, answers, strict=True)]

    def _settle(self, rank: Rank, answer: PlainAnswer) -> None:
        """What a rank owed is here."""
        rank.in_flight = None
        rank.state, rank.reason = "ready", ""
        rank.calls += 1
        rank.answer = answer

    def abandon(self) -> None:
        """The request ended: answers still to come are dropped, queued pieces forgotten."""
        self._unfold()
        for rank in self.ranks:
            rank.abandon()

    def close(self) -> None:
        stop = codec.encode(Stop("the coordinator ends"))
        for rank in self.ranks:
            self._hub.send(rank.rank, rank.incarnation, stop)
        self._hub.close()

    def release(self) -> None:
        """Close the descriptors this fleet made."""
        self._launcher.close()
        self._others.close()
        for fd in self._pidfds:
            os.close(fd)

    def _take(self, ready: set[int]) -> list[Event]:
        """Messages of workers and of the launcher, without waiting. `ready`: descriptors that turned readable."""
        events: list[Event] = []
        while self._launcher_stirs:  # first: a rank's ready counts once its start is known
            packet = self._from_launcher()
            self._launcher_stirs = packet is not None
            if packet:
                events += self._told(*packet)
        for rank, incarnation, message in self._hub.receive():
            events += self._heard(rank, incarnation, message)
        for rank, reply in self._group.receive(ready):
            events += self._answered(self.ranks[rank], self.ranks[rank].incarnation, reply)
        return events

    def _heard(self, number: int, incarnation: int, message: Any) -> list[Event]:
        if not 0 <= number < len(self.ranks):
            return []
        rank = self.ranks[number]
        if isinstance(message, Hello):
            return []
        if isinstance(message, Ready):
            if incarnation == rank.incarnation and rank.state == "starting":
                rank.state, rank.reason = "ready", ""
                rank.device, rank.backend, rank.rung = message.device, message.backend, message.rung
                self.changed = True
                log.info("rank %d (incarnation %d) is ready: %s, rung %s", number, incarnation, message.backend, message.rung)
            return []
        return self._answered(rank, incarnation, message)

    def _answered(self, rank: Rank, incarnation: int, message: Any) -> list[Event]:
        flight = rank.in_flight
        damaged = not isinstance(message, Partial | Failed)
        expected = (self._spec.run_id, rank.incarnation, flight.sequence, flight.layer) if flight else None
        if incarnation != rank.incarnation or flight is None:
            return self._drop(rank, "nothing was asked of it")
        if not damaged and (message.run_id, message.incarnation, message.sequence, message.layer) != expected:
            return self._drop(rank, f"call {flight.sequence} of layer {flight.layer} was asked for, not {message.sequence}")
        if isinstance(message, Partial) and not flight.abandoned:
            self._settle(rank, message)
            return [Answered(rank.rank, flight, message)]
        rank.in_flight = None
        rank.state, rank.reason = "ready", ""
        if flight.abandoned:
            self.changed = True
            return self._drop(rank, f"call {flight.sequence} of layer {flight.layer} came late")
        if damaged:
            self._drop(rank, "it is malformed")
        else:
            rank.calls += 1
        return [Answered(rank.rank, flight, None if damaged else message)]

    def _drop(self, rank: Rank, why: str) -> list[Event]:
        rank.dropped += 1
        log.warning("rank %d (incarnation %d): reply dropped (%d so far): %s", rank.rank, rank.incarnation, rank.dropped, why)
        return []

    def _died(self, rank: Rank) -> list[Event]:
        if rank.pidfd < 0:
            return []
        self._others.unregister(rank.pidfd)
        self._pidfds.pop(rank.pidfd)
        os.close(rank.pidfd)
        self._hub.forget(rank.rank, rank.incarnation)
        owed = rank.stop("died")
        self._owed_at_death[rank.rank, rank.incarnation] = owed
        self.changed = True
        log.warning("rank %d (incarnation %d, pid %d) died%s", rank.rank, rank.incarnation, rank.pid, _owing(owed, rank.last_layer))
        return [Lost(rank.rank, owed, dead=True)]

    def _look(self, now_s: float) -> list[Event]:
        """Stalls, by the progress records."""
        events: list[Event] = []
        for rank in self.ranks:
            if rank.state not in ("starting", "ready", "serving", "stalled"):
                continue
            beat = heartbeat.read(self.replies[rank.rank].record)
            found = verdict(rank, beat, self._deadlines, now_s)
            quiet_s = silence(rank, beat, now_s)
            where = f"rank {rank.rank} (incarnation {rank.incarnation}, layer {rank.last_layer})"
            if found == "kill" and not rank.kill_asked:
                rank.kill_asked = self._tell(supervision.KillWorker(rank.rank, rank.incarnation, f"no progress for {quiet_s:.1f} s"))
                log.error("%s showed no progress for %.1f s: asked the launcher to kill it", where, quiet_s)
            if rank.state == "serving" and found in ("stalled", "kill"):
                owed = rank.abandon()
                rank.state, rank.reason = "stalled", f"no progress for {quiet_s:.1f} s in layer {rank.last_layer}"
                log.warning("%s showed no progress for %.1f s%s", where, quiet_s, _owing(owed, rank.last_layer))
                events.append(Lost(rank.rank, owed, dead=False))
                self.changed = True
            elif found == "moves":
                rank.state, rank.reason = "serving", ""
                log.info("%s moves again; it rejoins once it has answered", where)
                self.changed = True
        return events

    def _from_launcher(self) -> tuple[Any, list[int]] | None:
        try:
            return supervision.receive(self._launcher)
        except (EOFError, OSError) as error:
            raise ShutdownError("the launcher is gone") from error

    def _told(self, message: Any, fds: list[int]) -> list[Event]:
        if isinstance(message, supervision.Shutdown):
            raise ShutdownError(message.reason)
        if isinstance(message, supervision.WorkerStarted) and len(fds) == 1:
            rank = self.ranks[message.rank]
            events = self._died(rank)
            rank.start(message.incarnation, message.pid, fds[0], time.monotonic())
            self._pidfds[fds[0]] = rank.rank
            self._others.register(fds[0], select.EPOLLIN)
            self.changed = True
            return events
        if isinstance(message, supervision.WorkerGone):
            rank = self.ranks[message.rank]
            events = self._died(rank) if rank.incarnation == message.incarnation else []
            if rank.incarnation == message.incarnation or rank.state in ("down", "gone"):
                rank.state, rank.reason = ("down" if message.returns else "gone"), message.reason
                self.changed = True
            owed = self._owed_at_death.pop((message.rank, message.incarnation), [])
            return [*events, Crashed(message.rank, owed, message.reason)]
        for fd in fds:
            os.close(fd)
        return []

    def _tell(self, message: Any) -> bool:
        """To the launcher, without waiting."""
        with contextlib.suppress(OSError):
            return supervision.send(self._launcher, message)
        return False

    def fatal(self, exit_code: int, error: str) -> None:
        """Tell the launcher why the run cannot go on."""
        self._tell(supervision.Fatal(exit_code, error))

    def _report(self, now_s: float) -> None:
        if self.status is not None and self._must_report(now_s):
            self.changed = not self._tell(self.status())
            self._status_at = now_s

    def _must_report(self, now_s: float) -> bool:
        return self.status is not None and (self.changed or now_s - self._status_at >= STATUS_EVERY_S)

    def rank_status(self) -> list[list[int | str | dict[str, int]]]:
        """supervision.RankStatus of every rank, as lists."""
        return [
            [r.rank, r.incarnation, "down" if r.state == "gone" else r.state, r.reason, r.last_layer, r.calls, r.resends, r.dropped,
             r.device, r.backend, r.rung, r.bytes_by_rung(), r.pid]
            for r in self.ranks
        ]  # fmt: skip

    def _hub_stirs(self) -> None:
        self._hub.may_have = True

    def _launcher_speaks(self) -> None:
        self._launcher_stirs = True

    def _launcher_gone(self) -> None:
        raise ShutdownError("the launcher is gone")


def _owing(pieces: list[Piece], layer: int) -> str:
    experts = [e for piece in pieces for e in piece.experts]
    return f"; dealing again, layer {layer}: experts {' '.join(map(str, experts))}" if experts else ""
