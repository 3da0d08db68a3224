"""One conformance suite for both transports, over real sockets, cells and eventfds."""

import ctypes
import dataclasses
import os
import secrets
import struct
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from evrun.expert_worker.wire import exchange
from evrun.expert_worker.wire.heartbeat import Heart, read
from evrun.expert_worker.wire.hub import Hub
from evrun.expert_worker.wire.link import TRANSPORTS, ExpertGroup, ExpertPort, open_group, open_port
from evrun.expert_worker.wire.messages import Call, Failed, Hello, Partial, Stop, codec
from evrun.expert_worker.wire.slots import SLOTS, CallMemory, ReplyMemory, SlotLayout

RUN, SECRET = "run-1", secrets.token_hex(8)
LAYOUT = SlotLayout(world_size=2, tokens=4, hidden=64, top_k=2, itemsize=2, exact=False, num_experts=16)


class Ends:
    """Both ends of a transport with two ranks, in one process."""

    def __init__(self, transport: str, folder: Path, processes: int) -> None:
        self._fds = [os.memfd_create("calls"), *(os.memfd_create(f"rank-{r}") for r in range(2))]
        for fd, size in zip(self._fds, [LAYOUT.call_bytes, LAYOUT.reply_bytes, LAYOUT.reply_bytes], strict=True):
            os.ftruncate(fd, size)
        self.address = f"ipc://{folder}/hub"
        self.hub = Hub(self.address, RUN, SECRET)
        self.calls = calls = CallMemory(LAYOUT, self._fds[0], writable=True)
        self.replies = [ReplyMemory(LAYOUT, fd, writable=True) for fd in self._fds[1:]]
        bells = [(os.eventfd(0), os.eventfd(0)) for _ in range(2)]
        self._fds += [fd for pair in bells for fd in pair]
        self.lifeline_read, self.lifeline_write = os.pipe()
        self._fds.append(self.lifeline_read)
        self.group: ExpertGroup = open_group(transport, self.hub, RUN, calls, self.replies, bells)
        self.ports: list[ExpertPort] = []
        for rank in range(2):
            cells = calls.cell(rank), self.replies[rank].cell
            port = open_port(transport, self.address, rank, 1, self.lifeline_read, RUN, *cells, bells[rank], processes)
            self.ports.append(port)

    def hello(self, rank: int, secret: str = SECRET) -> None:
        self.ports[rank].announce(Hello(secret, RUN, rank, 1, os.getpid()))

    def collect(self, count: int, timeout_s: float = 5.0) -> list[tuple[int, object]]:
        """(rank, message) of the next `count` messages, whichever way they come."""
        found: list[tuple[int, object]] = []
        deadline = time.monotonic() + timeout_s
        while len(found) < count and time.monotonic() < deadline:
            self.hub.may_have = True
            found += [(rank, message) for rank, _, message in self.hub.receive()]
            found += self.group.receive(self.group.fds())
            time.sleep(0.001)
        return found

    def close(self) -> None:
        for port in self.ports:
            port.close()
        self.hub.close()
        for fd in self._fds:
            os.close(fd)
        if self.lifeline_write >= 0:
            os.close(self.lifeline_write)


MANY = 1 << 20
"""Processes: more than there are cores, so that nothing spins."""
WAYS = {
    "doorbell": ("doorbell", MANY, True),
    "doorbell, spinning": ("doorbell", 0, True),
    "doorbell, no native library": ("doorbell", MANY, False),
    "zmq": ("zmq", MANY, True),
}
assert {transport for transport, _, _ in WAYS.values()} == set(TRANSPORTS)


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def ends(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    transport, processes, native = request.param
    assert exchange.load(), "the native library was not built"
    if not native:
        monkeypatch.setattr(exchange, "load", lambda: None)
    both = Ends(transport, tmp_path, processes)
    yield both
    both.close()


@pytest.fixture(params=[MANY, 0], ids=["sleeping", "spinning"])
def bells(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ends]:
    """The native way alone: what only it has."""
    both = Ends("doorbell", tmp_path, request.param)
    yield both
    both.close()


def call(sequence: int) -> Call:
    return Call(RUN, 1, sequence, 3, 0, 2, [1, 5], False)


def partial(sequence: int) -> Partial:
    return Partial(RUN, 1, sequence, 3, 2, -1, [0, 0, 0, 1, 0, 0, 0], 0.0)


def take(port: ExpertPort) -> object:
    deadline = time.monotonic() + 5.0
    while (message := port.receive(0.5)) is None:
        assert time.monotonic() < deadline
    return message


def test_calls_reach_their_rank_and_replies_name_theirs(ends: Ends) -> None:
    for rank in range(2):
        ends.hello(rank)
    assert {rank for rank, _ in ends.collect(2)} == {0, 1}
    for sequence in range(1, 50):
        for rank in (1, 0):
            ends.group.submit([(rank, call(2 * sequence + rank))])
        for rank in (0, 1):
            assert take(ends.ports[rank]) == call(2 * sequence + rank)
            ends.ports[rank].reply(ends.ports[rank].encode(partial(2 * sequence + rank)))
        assert sorted(ends.collect(2), key=lambda f: f[0]) == [(r, partial(2 * sequence + r)) for r in range(2)]


def test_nothing_comes_from_nothing(ends: Ends) -> None:
    assert ends.ports[0].receive(0.01) is None
    assert ends.group.receive(ends.group.fds()) == []


def test_a_failure_names_its_cause(ends: Ends) -> None:
    ends.hello(0)
    ends.collect(1)
    failed = Failed(RUN, 1, 7, 3, "scale byte 255 in ‘w1’, row 5")
    ends.ports[0].reply(ends.ports[0].encode(failed))
    assert ends.collect(1) == [(0, failed)]


def test_half_a_reply_is_a_damaged_one(ends: Ends) -> None:
    ends.hello(0)
    ends.collect(1)
    data = ends.ports[0].encode(partial(7))
    ends.ports[0].reply(data[: len(data) // 2])
    assert ends.collect(1) == [(0, None)]


def test_stop_reaches_a_worker_that_waits(ends: Ends) -> None:
    ends.hello(0)
    ends.collect(1)
    threading.Timer(0.05, lambda: ends.hub.send(0, 1, codec.encode(Stop("end")))).start()
    assert take(ends.ports[0]) == Stop("end")


def test_a_launcher_that_is_gone_ends_the_wait(ends: Ends) -> None:
    threading.Timer(0.05, lambda: os.close(ends.lifeline_write)).start()
    with pytest.raises(EOFError, match="launcher"):
        ends.ports[0].receive(5.0)
    ends.lifeline_write = -1


def test_a_peer_without_the_secret_is_not_heard(ends: Ends) -> None:
    ends.hello(0, secret="guess")
    ends.ports[0].announce(partial(1))
    assert ends.collect(1, timeout_s=0.3) == []
    assert ends.hub.junk == 2
    assert not ends.hub.send(0, 1, b"")


def test_junk_is_counted_and_others_are_still_served(ends: Ends) -> None:
    import pickle

    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(ends.address)
    junk = [b"", b"\xff" * 100, pickle.dumps({"a": 1}), codec.encode(Hello("guess", RUN, 1, 1, 1)), codec.encode(call(1))]
    for data in junk:
        stranger.send(data)
    stranger.send_multipart([b"one", b"two", b"three"])
    ends.hello(1)
    assert [(rank, type(message)) for rank, message in ends.collect(1)] == [(1, Hello)]
    deadline = time.monotonic() + 5
    while ends.hub.junk < len(junk) + 1 and time.monotonic() < deadline:
        ends.collect(1, timeout_s=0.05)
    assert ends.hub.junk == len(junk) + 1
    stranger.close()
    context.term()


def test_a_message_over_the_limit_costs_only_its_sender(ends: Ends) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(ends.address)
    stranger.send(b"x" * (9 << 20))
    ends.hello(0)
    assert [rank for rank, _ in ends.collect(1)] == [0]
    stranger.close()
    context.term()


def test_a_dead_incarnation_is_forgotten(ends: Ends) -> None:
    ends.hello(0)
    ends.collect(1)
    ends.hub.forget(0, 1)
    ends.ports[0].announce(partial(1))
    assert ends.collect(1, timeout_s=0.2) == []
    assert ends.hub.junk == 1


BOTH = array("i", [1, 0])


def gather(ends: Ends, timeout_s: float = 5.0) -> object:
    """The answers of both ranks; the lifeline stands for everything else that may end the wait."""
    return ends.group.gather(BOTH, ends.lifeline_read, timeout_s)


def ask(ends: Ends, sequence: int) -> None:
    """Both ranks have been asked and have read the call."""
    ends.group.submit([(rank, call(sequence + rank)) for rank in (0, 1)])
    assert [take(port) for port in ends.ports] == [call(sequence), call(sequence + 1)]


def test_answers_of_several_ranks_are_gathered_at_once(bells: Ends) -> None:
    for sequence in range(1, 50, 2):
        ask(bells, sequence)
        slow = threading.Timer(0.002, lambda s=sequence: bells.ports[1].answer(partial(s + 1)))
        slow.start()
        bells.ports[0].answer(partial(sequence))
        answers = gather(bells)
        assert [(a.rows, a.checksum, list(a.counters)) for a in answers] == [(2, -1, [0, 0, 0, 1, 0, 0, 0])] * 2  # type: ignore[attr-defined]
        assert bells.group.receive(bells.group.fds()) == []
        slow.join()


ODD = {
    "another sequence": partial(99),
    "a failure": Failed(RUN, 1, 2, 3, "a bad row"),
    "another incarnation": Partial(RUN, 2, 2, 3, 2, -1, [0] * 7, 0.0),
    "another layer": Partial(RUN, 1, 2, 4, 2, -1, [0] * 7, 0.0),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_an_answer_that_is_not_plain_is_left_for_receive(bells: Ends, odd: Partial | Failed) -> None:
    ask(bells, 1)
    bells.ports[0].answer(partial(1))
    bells.ports[1].reply(bells.ports[1].encode(odd))
    assert gather(bells) == []
    assert bells.group.receive(bells.group.fds()) == [(0, partial(1)), (1, odd)]


def test_a_damaged_cell_is_left_for_receive(bells: Ends) -> None:
    for damage in (b"", b"\xff" * 112, struct.pack("<q", 0x45565232)):
        ask(bells, 1)
        bells.ports[0].answer(partial(1))
        bells.ports[1].reply(damage)
        assert gather(bells) == []
        assert bells.group.receive(bells.group.fds()) == [(0, partial(1)), (1, None)]


def test_a_second_answer_does_not_pass_for_the_next_calls(bells: Ends) -> None:
    ask(bells, 1)
    for rank in (0, 1):
        bells.ports[rank].answer(partial(1 + rank))
    assert gather(bells)
    bells.ports[0].reply(bells.ports[0].encode(partial(1)))
    ask(bells, 3)
    bells.ports[1].answer(partial(4))
    assert gather(bells) == []
    assert bells.group.receive(bells.group.fds()) == [(0, partial(1)), (1, partial(4))]


def test_the_wait_for_answers_ends_for_others_and_with_its_time(bells: Ends) -> None:
    ask(bells, 1)
    bells.ports[0].answer(partial(1))
    started = time.monotonic()
    assert gather(bells, 0.05) == []
    assert 0.04 < time.monotonic() - started < 2
    threading.Timer(0.05, lambda: os.write(bells.lifeline_write, b".")).start()
    assert gather(bells) == []
    assert os.read(bells.lifeline_read, 1) == b"."
    bells.ports[1].answer(partial(2))
    assert gather(bells)


def test_a_message_that_is_no_call_of_this_incarnation_is_told(bells: Ends) -> None:
    stale = Call(RUN, 7, 1, 3, 0, 2, [1, 5], False)
    bells.group.submit([(0, stale)])
    assert take(bells.ports[0]) == stale
    bells.group.submit([(0, call(2))])
    assert take(bells.ports[0]) == call(2)


# ---- calls that a worker serves without Python ----

COUNTS = (ctypes.c_int64 * 7)(*range(7))


def one(sequence: int, **changes: object) -> Call:
    return dataclasses.replace(call(sequence), **{"tokens": 1, **changes})  # type: ignore[arg-type]


def shorten(ends: Ends) -> None:
    lane = exchange.empty_lane()
    assert lane
    for rank in range(2):
        ends.ports[rank].shorten(lane, ctypes.addressof(COUNTS), ends.calls, ends.replies[rank], LAYOUT.num_experts)


@contextmanager
def workers(ends: Ends) -> Iterator[list[object]]:
    """Both ports served by threads; gives the messages that reached Python, and a Stop ends each."""
    given: list[object] = []

    def loop(port: ExpertPort) -> None:
        while not isinstance(message := port.receive(0.2), Stop):
            if message is not None:
                given.append(message)

    for rank in range(2):
        ends.hello(rank)
    ends.collect(2)
    threads = [threading.Thread(target=loop, args=(port,)) for port in ends.ports]
    for thread in threads:
        thread.start()
    yield given
    for rank in range(2):
        ends.hub.send(rank, 1, codec.encode(Stop("end")))
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_calls_of_one_token_are_answered_without_python(bells: Ends) -> None:
    shorten(bells)
    hearts = [Heart(reply.record, 1, os.getpid()) for reply in bells.replies]
    before = [read(reply.record) for reply in bells.replies]
    with workers(bells) as given:
        for sequence in range(1, 200, 2):
            bells.group.submit([(rank, one(sequence + rank, experts=[1, 5, 9][: 2 + rank])) for rank in (0, 1)])
            answers = gather(bells)
            assert [(a.rows, a.checksum, list(a.counters)) for a in answers] == [(3, -1, [*range(7)]), (2, -1, [*range(7)])]  # type: ignore[attr-defined]
            assert all(0 <= a.compute_s < 5 for a in answers)  # type: ignore[attr-defined]
        assert given == []
    for heart, reply, first in zip(hearts, bells.replies, before, strict=True):
        beat = read(reply.record)
        assert beat
        assert first
        assert (beat.incarnation, beat.pid, beat.state, beat.layer, beat.calls, heart.calls) == (1, os.getpid(), "ready", 3, 100, 100)
        assert beat.sequence in (199, 200)
        assert beat.progress >= first.progress + 200
        assert first.at_s < beat.at_s <= time.monotonic()


NOT_SHORT = {
    "two tokens": one(2, tokens=2),
    "a checksum": one(2, checksum=True),
    "no expert": one(2, experts=[]),
    "experts out of order": one(2, experts=[5, 1]),
    "an expert twice": one(2, experts=[5, 5]),
    "an expert below": one(2, experts=[-1, 5]),
    "an expert above": one(2, experts=[1, LAYOUT.num_experts]),
    "a slot above": one(2, slot=SLOTS),
    "a slot below": one(2, slot=-1),
    "another incarnation": one(2, incarnation=7),
}


@pytest.mark.parametrize("other", NOT_SHORT.values(), ids=NOT_SHORT)
def test_every_other_call_is_pythons(bells: Ends, other: Call) -> None:
    shorten(bells)
    for ours in (one(1), one(3)):
        bells.group.submit([(0, other)])
        assert take(bells.ports[0]) == other
        bells.group.submit([(0, ours)])
        assert bells.ports[0].receive(0.0) is None
        ((rank, answer),) = bells.collect(1)
        assert (rank, type(answer)) == (0, Partial)
        assert (answer.sequence, answer.rows) == (ours.sequence, 2)  # type: ignore[attr-defined]


def test_a_function_that_refuses_leaves_the_call_to_python(bells: Ends) -> None:
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)(lambda lane, call: -1)
    lane = exchange.NativeLane(ctypes.cast(function, ctypes.c_void_p).value or 0, 0)
    bells.ports[0].shorten(lane, ctypes.addressof(COUNTS), bells.calls, bells.replies[0], LAYOUT.num_experts)
    bells.group.submit([(0, one(1))])
    assert take(bells.ports[0]) == one(1)
    assert bells.group.receive(bells.group.fds()) == []


def test_a_round_is_sent_awaited_and_summed(bells: Ends) -> None:
    shorten(bells)
    short = bells.group.round
    assert short
    x, ids, weights = (ctypes.c_uint16 * 64)(*range(64)), (ctypes.c_int32 * 2)(5, 1), (ctypes.c_float * 2)(0.25, 0.75)
    out = (ctypes.c_float * 64)()
    for rank in range(2):
        bells.replies[rank].partial(1)[:] = 10.0 * (rank + 1)
    with workers(bells) as given:
        for sequence in range(1, 100, 2):
            slot = sequence // 2 % SLOTS
            batch = [2, sequence, 3, slot, 0, 1, 1, 1, 1, 1, 1, 5]
            short.send(batch, *map(ctypes.addressof, (x, ids, weights)))
            assert short.wait(bells.lifeline_read, 5000)
            assert short.sum(ctypes.addressof(out))
            assert [*out] == [30.0] * 64
            assert [a.rows for a in short.answers] == [1, 1]
            kept = bells.calls.views(slot, 1)
            assert [a.ravel().tolist() for a in kept] == [[*range(64)], [5, 1], [0.25, 0.75]]
        bells.replies[1].partial(1)[0, 63] = float("inf")
        short.send([2, 101, 3, 0, 0, 1, 1, 1, 1, 1, 1, 5], *map(ctypes.addressof, (x, ids, weights)))
        assert short.wait(bells.lifeline_read, 5000)
        assert not short.sum(ctypes.addressof(out))
        assert [rank for rank, _ in bells.group.receive(bells.group.fds())] == [0, 1]  # nothing was taken
        assert given == []
