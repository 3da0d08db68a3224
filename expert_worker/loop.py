"""The loop of a worker: receive a call, compute it, answer, show progress. It keeps nothing of a request."""

from __future__ import annotations

import logging
import time
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from evrun.expert_worker.faults import Faults
from evrun.expert_worker.lane import Lane
from evrun.expert_worker.spec import WorkerSpec
from evrun.expert_worker.wire.codec import CodecError
from evrun.expert_worker.wire.errors import PayloadError
from evrun.expert_worker.wire.heartbeat import Heart
from evrun.expert_worker.wire.link import ExpertPort
from evrun.expert_worker.wire.messages import Call, Failed, Partial, Stop
from evrun.expert_worker.wire.slots import SLOTS, CallMemory, ReplyMemory

IDLE_BEAT_S = 1.0
MAX_CAUSE = 1500
"""Bytes of a cause; a cell has room for it."""
log = logging.getLogger("loop")


class Loop:
    """Serves calls until it is told to stop. Raises EOFError when the launcher is gone."""

    def __init__(
        self, spec: WorkerSpec, num_experts: int, port: ExpertPort, calls: CallMemory, reply: ReplyMemory, lane: Lane, heart: Heart
    ) -> None:
        self._spec, self._num_experts = spec, num_experts
        self._port, self._calls, self._reply = port, calls, reply
        self._lane, self._heart = lane, heart
        self._faults = Faults(spec.faults, spec.rank, spec.incarnation)
        if lane.short and not (self._faults or spec.timeline):  # those look at what happens in Python
            port.shorten(lane.short, lane.counts.address, calls, reply, num_experts)
        self.dropped = 0
        """Messages that were malformed, or meant for another incarnation."""

    def run(self) -> None:
        while True:
            try:
                message = self._port.receive(IDLE_BEAT_S)
            except CodecError as error:
                self._drop(str(error))
                continue
            if message is None:
                self._heart.beat()
                continue
            if isinstance(message, Stop):
                log.info("stop: %s", message.reason)
                return
            problem = self._unfit(message)
            if problem:
                self._drop(problem)
                continue
            self._serve(message)

    def _serve(self, call: Call) -> None:
        number = self._heart.calls + 1
        self._faults.at("receive", number)
        self._heart.begin(call.layer, call.sequence)
        started = time.monotonic()
        x, ids, weights = self._calls.views(call.slot, call.tokens)
        self._faults.at("read", number)
        out = self._result(call, ids)
        answer: Partial | Failed
        try:
            rows = self._lane.compute(call.layer, call.experts, x, ids, weights, out)
        except PayloadError as error:
            log.error("layer %d: %s", call.layer, error)
            cause = str(error).encode()[:MAX_CAUSE].decode(errors="ignore")
            answer = Failed(call.run_id, call.incarnation, call.sequence, call.layer, cause)
        else:
            checksum = zlib.crc32(out.data) if call.checksum else -1
            spent = time.monotonic() - started
            counts = self._lane.counts.in_order()
            answer = Partial(call.run_id, call.incarnation, call.sequence, call.layer, rows, checksum, counts, spent)
        self._faults.at("compute", number)
        self._heart.answered()
        self._answer(answer, out, self._faults.at("write", number))
        self._heart.enter("ready")

    def _result(self, call: Call, ids: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
        if self._reply.layout.exact:
            return self._reply.rows(int(np.isin(ids, call.experts).sum()))
        return self._reply.partial(call.tokens)

    def _answer(self, answer: Partial | Failed, out: npt.NDArray[Any], fault: str | None) -> None:
        if fault is None and isinstance(answer, Partial):
            self._port.answer(answer)
            return
        if fault and isinstance(answer, Partial):
            answer = _spoil(answer, out, fault)
        data = self._port.encode(answer)
        self._port.reply(data[: len(data) // 2] if fault == "malformed" else data)
        if fault == "twice":
            self._port.reply(data)

    def _unfit(self, message: Any) -> str | None:
        """Why a message is not a call that this incarnation can serve, or None."""
        if not isinstance(message, Call):
            return f"unexpected {type(message).__name__}"
        if (message.run_id, message.incarnation) != (self._spec.run_id, self._spec.incarnation):
            return f"call {message.sequence} is meant for incarnation {message.incarnation} of run {message.run_id}"
        layout = self._calls.layout
        fits = 0 < message.tokens <= layout.tokens and 0 <= message.slot < SLOTS
        experts = message.experts
        fits = fits and bool(experts) and experts == sorted(set(experts)) and experts[0] >= 0 and experts[-1] < self._num_experts
        return None if fits else f"call {message.sequence} does not fit the slots or the experts of this checkpoint"

    def _drop(self, why: str) -> None:
        self.dropped += 1
        log.warning("dropped a message (%d so far): %s", self.dropped, why)


def _spoil(answer: Partial, out: npt.NDArray[Any], fault: str) -> Partial:
    """The answer with one of the faults that only tests ask for."""
    if fault == "nan":
        out[:1] = 0x7FC0 if out.dtype == np.uint16 else np.nan
    fields = dict(vars(answer))
    if fault == "checksum":
        fields["checksum"] ^= 1
    if fault == "rows":
        fields["rows"] += 1
    return Partial(**fields)
