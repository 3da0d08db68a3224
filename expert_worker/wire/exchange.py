"""libevrun_exchange.so: the undisturbed way of a layer call through the cells, in one native call a side (csrc/exchange.cpp).

It speaks the messages of cell_codec over the cells of slots; what it does not take, the Python code beside it reads from the
same cells. The sums of a call (coordinator/combine.py) are there too. Without the library everything goes through Python:
slower, and said in the logs.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import evrun.expert_worker.wire
from evrun.expert_worker.wire.messages import COUNTERS, Call
from evrun.expert_worker.wire.slots import CallMemory, Cell, ReplyMemory

FILE_NAME = "libevrun_exchange.so"
ABI = 4
TAKEN, ODD, OTHER = 1, 2, 3
"""What ended a worker's wait: a call, in the port's fields; another message in the cell; the socket or the lifeline. 0: the time."""
MOST_RANKS = 64
"""That share one token's call of Round; it has never more shares than it has experts."""
log = logging.getLogger("exchange")

Counters = ctypes.c_int64 * len(COUNTERS)


class Rank(ctypes.Structure):
    """The coordinator's end of one rank."""

    _fields_ = (
        ("request", ctypes.c_void_p),
        ("reply", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("request_bell", ctypes.c_int32),
        ("reply_bell", ctypes.c_int32),
        ("seen", ctypes.c_int64),
        ("incarnation", ctypes.c_int64),
        ("sequence", ctypes.c_int64),
        ("layer", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("checksum", ctypes.c_int64),
        ("counters", Counters),
        ("compute_s", ctypes.c_double),
    )


class Desk(ctypes.Structure):
    """Where one token's layer calls are made."""

    _fields_ = (
        ("ranks", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("ids_at", ctypes.c_int64),
        ("weights_at", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("itemsize", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("exact", ctypes.c_int64),
        ("spin_ns", ctypes.c_int64),
        ("took_ns", ctypes.c_int64 * 2),
        ("n", ctypes.c_int32),
        ("which", ctypes.c_int32 * MOST_RANKS),
    )


class Port(ctypes.Structure):
    """A worker's end and the newest call that it took."""

    _fields_ = (
        ("request", ctypes.c_void_p),
        ("reply", ctypes.c_void_p),
        ("request_bell", ctypes.c_int32),
        ("reply_bell", ctypes.c_int32),
        ("socket", ctypes.c_int32),
        ("lifeline", ctypes.c_int32),
        ("seen", ctypes.c_int64),
        ("incarnation", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("sequence", ctypes.c_int64),
        ("layer", ctypes.c_int64),
        ("slot", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("checksum", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("experts", ctypes.POINTER(ctypes.c_int32)),
    )


class Turn(ctypes.Structure):
    """How a worker serves calls of one token without Python."""

    _fields_ = (
        ("compute", ctypes.c_void_p),
        ("lane", ctypes.c_void_p),
        ("record", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("ids_at", ctypes.c_int64),
        ("weights_at", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("num_experts", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
    )


class NativeLane(NamedTuple):
    """link.Short."""

    function: int
    lane: int


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library with its functions declared, or None: the reason is logged once."""
    folders = [Path(folder) for folder in evrun.expert_worker.wire.__path__]
    path = next((f / FILE_NAME for f in folders if (f / FILE_NAME).is_file()), None)
    try:
        if path is None:
            raise OSError(f"not found in {', '.join(map(str, folders))}: it was not built")
        library = ctypes.CDLL(str(path))
        if library.evrun_exchange_abi() != ABI:
            raise OSError(f"{path} is of another version")
    except (OSError, AttributeError) as error:
        log.warning("%s: %s; layer calls take the slower way through Python (install again with a C++17 compiler)", FILE_NAME, error)
        return None
    number, pointer = ctypes.c_int32, ctypes.c_void_p
    library.evrun_submit.argtypes, library.evrun_submit.restype = (pointer, pointer, number), None
    library.evrun_gather.argtypes = (pointer, pointer, number, number, ctypes.c_int64, number)
    library.evrun_send.argtypes, library.evrun_send.restype = (pointer, pointer, pointer, pointer, pointer), None
    library.evrun_wait.argtypes = (pointer, number, number)
    library.evrun_sum.argtypes = (pointer, pointer)
    library.evrun_receive.argtypes = (pointer, ctypes.c_int64, number)
    library.evrun_serve.argtypes = (pointer, pointer, ctypes.c_int64, number)
    library.evrun_reply.argtypes = (pointer, ctypes.c_int64, ctypes.c_int64, ctypes.c_double, pointer)
    library.evrun_reply.restype = None
    library.evrun_add_partials.argtypes = (pointer, number, ctypes.c_int64, pointer)
    library.evrun_add_rows.argtypes = (pointer, pointer, ctypes.c_int64, number, ctypes.c_int64, number, pointer)
    return library


def empty_lane() -> NativeLane | None:
    """Computes nothing: what is left of a layer call is the way there and back."""
    library = load()
    return NativeLane(ctypes.cast(library.evrun_empty_lane, ctypes.c_void_p).value or 0, 0) if library else None


def ranks_over(requests: Sequence[Cell], replies: Sequence[ReplyMemory], bells: Sequence[tuple[int, int]]) -> Any:
    """An array of Rank over this memory and (request eventfd, reply eventfd); replies that lie there already count as seen."""
    ranks = (Rank * len(replies))()
    for rank, request, reply, pair in zip(ranks, requests, replies, bells, strict=True):
        rank.request, rank.reply, rank.seen = request.address, reply.cell.address, reply.cell.turn()
        rank.result = reply.result_address
        rank.request_bell, rank.reply_bell = pair
    return ranks


class Ranks:
    """The coordinator's end of all ranks: submit calls, gather their plain answers."""

    def __init__(self, library: ctypes.CDLL, ranks: Any) -> None:
        self._submit, self._gather = library.evrun_submit, library.evrun_gather
        self._ranks = ranks
        self._address = ctypes.addressof(ranks)

    def submit(self, calls: Sequence[tuple[int, Call]]) -> None:
        batch = array("q")
        for rank, c in calls:
            batch.extend((rank, c.incarnation, c.sequence, c.layer, c.slot, c.tokens, c.checksum, len(c.experts)))
            batch.extend(c.experts)
        self._submit(self._address, batch.buffer_info()[0], len(calls))

    def gather(self, which: array[int], others_fd: int, spin_ns: int, timeout_ms: int) -> bool:
        """Whether all of `which` (int32) gave plain answers to their newest calls; their fields are in the array then."""
        return bool(self._gather(self._address, which.buffer_info()[0], len(which), others_fd, spin_ns, timeout_ms))


class Round:
    """link.Round, for this memory."""

    def __init__(self, library: ctypes.CDLL, ranks: Any, calls: CallMemory, spin_ns: int) -> None:
        self._send, self._wait, self._sum = library.evrun_send, library.evrun_wait, library.evrun_sum
        self.answers = list(ranks)
        layout = calls.layout
        self._desk = Desk(
            ctypes.addressof(ranks), calls.address + layout.slot_offset(0), layout.slot_bytes, layout.ids_at, layout.weights_at,
            layout.hidden, layout.itemsize, layout.top_k, layout.exact, spin_ns,
        )  # fmt: skip
        self._held = ranks, calls
        self._address = ctypes.addressof(self._desk)

    def send(self, batch: list[int], x: int, ids: int, weights: int) -> None:
        words = array("q", batch)
        self._send(self._address, words.buffer_info()[0], x, ids, weights)

    def wait(self, others_fd: int, timeout_ms: int) -> bool:
        return bool(self._wait(self._address, others_fd, timeout_ms))

    def sum(self, out: int) -> bool:
        return bool(self._sum(self._address, out))


class WorkerEnd:
    """A worker's end: wait for a call, whose fields are in the port then; answer it."""

    def __init__(self, library: ctypes.CDLL, port: Port) -> None:
        self._receive, self._serve, self._reply = library.evrun_receive, library.evrun_serve, library.evrun_reply
        self._port = port
        self._turn: Turn | None = None
        self._address = ctypes.addressof(port)
        self._counters = Counters()
        self._counters_address = ctypes.addressof(self._counters)

    def receive(self, spin_ns: int, timeout_ms: int) -> int:
        """TAKEN, ODD, OTHER or 0; calls that the turn can serve are served on the way."""
        if self._turn is None:
            woken: int = self._receive(self._address, spin_ns, timeout_ms)
            return woken
        woken = self._serve(self._address, ctypes.addressof(self._turn), spin_ns, timeout_ms)
        return woken

    def shorten(self, turn: Turn) -> None:
        self._turn = turn

    def reply(self, rows: int, checksum: int, compute_s: float, counters: list[int | ctypes.c_int64]) -> None:
        self._counters[:] = counters
        self._reply(self._address, rows, checksum, compute_s, self._counters_address)

