"""Routed experts as one callable: deal a layer call, send it, collect the shares, deal again what a loss leaves over.

The coordinator holds a call until its sum is made, so a lost rank costs a resend of its pieces, never a request.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from evrun.coordinator.combine import Share, combine_partials, combine_rows
from evrun.coordinator.deal import deal
from evrun.coordinator.events import Answered, Crashed, Lost
from evrun.coordinator.fleet import Fleet
from evrun.coordinator.rank import Piece
from evrun.coordinator.spec import CoordinatorSpec
from evrun.expert_worker.wire.errors import DeviceError, RunError
from evrun.expert_worker.wire.link import PlainAnswer
from evrun.expert_worker.wire.messages import Failed
from evrun.expert_worker.wire.slots import SLOTS

WAIT_S = 0.25
ORDINARY_ENDS = ("SIGKILL", "SIGTERM")
"""Deaths that say nothing of the call: somebody, or the memory killer, ended the process."""
log = logging.getLogger("experts")


class CancelledError(Exception):
    """The request's client cancelled it, or went away."""


@dataclass(eq=False)
class LayerCall:
    """One layer call between submit and sum."""

    layer: int
    slot: int
    tokens: int
    ids: npt.NDArray[np.int32]
    """The gate's own, not the slot's: later calls write that."""
    open: list[Piece] = field(default_factory=list)
    """Pieces without a share yet, wherever they are."""
    homeless: list[Piece] = field(default_factory=list)
    """Pieces that no live rank holds."""
    shares: list[Share] = field(default_factory=list)

    @functools.cached_property
    def draws(self) -> list[int]:
        """Tokens that chose each expert of the layer."""
        draws: list[int] = np.bincount(self.ids.ravel()).tolist()
        return draws

    def rows(self, experts: list[int]) -> int:
        """(token, expert) pairs of these experts."""
        return len(experts) if self.tokens == 1 else sum(self.draws[e] for e in experts)


class ExpertClient:
    """The model's `experts` callable, over the fleet. One call at a time; submit, then collect."""

    def __init__(self, spec: CoordinatorSpec, fleet: Fleet) -> None:
        self._spec, self._fleet = spec, fleet
        layout = fleet.layout
        self._sum = torch.empty(layout.tokens, layout.hidden, dtype=torch.float32)
        self._one_sum, self._sum_address = self._sum[:1], self._sum.data_ptr()
        self._dtype = torch.bfloat16 if layout.itemsize == 2 else torch.float32
        self._x = [torch.from_numpy(fleet.calls.x(slot, layout.tokens)).view(self._dtype) for slot in range(SLOTS)]
        self._token = layout.hidden, layout.top_k, layout.top_k
        """Values of one token's activation, expert ids and route weights."""
        self._turn = 0
        self._call: LayerCall | None = None
        self._sent: tuple[int, int, torch.Tensor] | None = None
        """Layer, slot and expert ids of a call on the short way."""
        self.resends = 0
        """Pieces sent again since start."""
        self.cancelled: Callable[[], bool] = lambda: False
        """Asked at every wait."""

    def __call__(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Submit x [T, H] (run's dtype), ids [T, K] int32, weights [T, K] fp32; the result collects the sum [T, H] fp32.

        The sum is valid until the next submit. Raises CancelledError, RunError, DeviceError, ShutdownError.
        """
        assert self._call is None, "one layer call at a time"
        assert self._sent is None, "one layer call at a time"
        tokens = x.shape[0]
        slot = self._turn = (self._turn + 1) % SLOTS
        if tokens == 1 and self._send(layer, slot, x, ids, weights):
            return self._finish
        own_ids = ids.numpy(force=True)
        call = self._call = LayerCall(layer, slot, tokens, own_ids)
        _, slot_ids, slot_weights = self._fleet.calls.views(slot, tokens)
        self._x[slot][:tokens].copy_(x)
        np.copyto(slot_ids, own_ids)
        np.copyto(slot_weights, weights.numpy(force=True))
        while not (live := self._fleet.live()):
            self._step()
        self._deal_out(call, own_ids.ravel().tolist(), live)
        self._feed()
        return self._collect

    def _send(self, layer: int, slot: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> bool:
        """One token the short way, if it lies in this process as in a slot; whether it went."""
        if x.dtype != self._dtype or ids.dtype != torch.int32 or weights.dtype != torch.float32:
            return False
        if (x.numel(), ids.numel(), weights.numel()) != self._token:
            return False
        here = x.is_cpu and ids.is_cpu and weights.is_cpu
        if not (here and x.is_contiguous() and ids.is_contiguous() and weights.is_contiguous() and (live := self._fleet.live())):
            return False
        dealt = deal(ids.tolist()[0], live, self._spec.deal)
        if not self._fleet.send(dealt, layer, slot, x.data_ptr(), ids.data_ptr(), weights.data_ptr()):
            return False
        self._sent = layer, slot, ids
        return True

    def _finish(self) -> torch.Tensor:
        """Collect what went the short way; what was not plain goes on as an ordinary call."""
        assert self._sent is not None, "collect comes once after a submit"
        if self.cancelled():
            raise CancelledError
        pieces = self._fleet.finish(self._sum_address)
        layer, slot, ids = self._sent
        self._sent = None
        if not pieces:
            return self._one_sum
        self._call = LayerCall(layer, slot, 1, ids.numpy(force=True), list(pieces.values()))
        return self._collect()

    def abandon(self) -> None:
        """Forget the call in hand, if any: its answers will be dropped."""
        self._call = self._sent = None
        self._fleet.abandon()

    def _collect(self) -> torch.Tensor:
        call = self._call
        assert call is not None, "collect comes once after a submit"
        out = self._sum[: call.tokens]
        while True:
            while call.open:
                self._step()
            exact = self._fleet.layout.exact
            if combine_rows(call.shares, call.ids, out.numpy()) if exact else combine_partials(call.shares, out.numpy()):
                self._call = None
                return out
            self._deal_non_finite_again(call)

    def _step(self) -> None:
        """Wait for something to happen and act on it."""
        if self.cancelled():
            raise CancelledError
        for event in self._fleet.pump(WAIT_S):
            if isinstance(event, Answered):
                self._answered(event)
            elif isinstance(event, Lost):
                self._lost(event)
            else:
                self._crashed(event)
        if self._call and not self._call.open:
            return
        if self._fleet.hopeless():
            reasons = "; ".join(f"rank {r.rank}: {r.reason}" for r in self._fleet.ranks)
            raise DeviceError(f"no worker is left and none will come back ({reasons}); see the workers' logs")
        self._feed()

    def _feed(self) -> None:
        """Give every free rank its next piece, and homeless pieces to whoever lives."""
        call = self._call
        if call is None:
            return
        if call.homeless and self._fleet.live():
            experts = [e for piece in call.homeless for e in piece.experts]
            causes = {e: piece.causes for piece in call.homeless for e in piece.experts}
            for piece in call.homeless:
                call.open.remove(piece)
            call.homeless.clear()
            self._deal_out(call, experts, self._fleet.live(), causes)
        handed = [(state.rank, state.queue.popleft()) for state in self._fleet.ranks if state.queue and state.free]
        if handed:
            for rank, _ in handed:
                self._keep_results_of(rank, call)
            self._fleet.submit(handed, call.layer, call.slot, call.tokens)

    def _deal_out(self, call: LayerCall, experts: list[int], ranks: list[int], causes: dict[int, list[str]] | None = None) -> None:
        """Queue pieces of these experts at the ranks. `causes`: why each expert failed so far."""
        for rank, share in deal(experts, ranks, self._spec.deal).items():
            piece = Piece(share, sorted({c for e in share for c in causes[e]}) if causes else [])
            call.open.append(piece)
            self._fleet.ranks[rank].queue.append(piece)

    def _keep_results_of(self, rank: int, call: LayerCall) -> None:
        """The rank's result memory is about to be used again: copy what lies there."""
        for i, share in enumerate(call.shares):
            if share.rank == rank:
                call.shares[i] = Share(rank, share.experts, share.result.copy())

    def _answered(self, event: Answered) -> None:
        call, piece = self._call, event.flight.piece
        if call is None or piece not in call.open:
            return
        if isinstance(event.message, Failed):
            self._failed(call, piece, event.rank, event.message.cause)
            return
        problem = "its reply is malformed" if event.message is None else self._take(call, piece, event.rank, event.message)
        if problem:
            self._fleet.ranks[event.rank].dropped += event.message is not None
            self._failed(call, piece, event.rank, problem)

    def _take(self, call: LayerCall, piece: Piece, rank: int, message: PlainAnswer) -> str | None:
        """Accept a share, or say what is wrong with it."""
        rows = call.rows(piece.experts)
        if message.rows != rows:
            return f"its reply has {message.rows} rows, {rows} were asked for"
        memory = self._fleet.replies[rank]
        result: npt.NDArray[Any] = memory.rows(rows) if self._fleet.layout.exact else memory.partial(call.tokens)
        if self._spec.check_payload and zlib.crc32(result.data) != message.checksum:
            return "its payload does not fit its checksum"
        call.open.remove(piece)
        call.shares.append(Share(rank, piece.experts, result, memory.result_address))
        return None

    def _deal_non_finite_again(self, call: LayerCall) -> None:
        """The sum holds NaN or infinity: so do some shares."""
        mask = np.uint16(0x7F80)
        for share in list(call.shares):
            finite = (share.result & mask != mask).all() if share.result.dtype == np.uint16 else np.isfinite(share.result).all()
            if not finite:
                call.shares.remove(share)
                piece = Piece(share.experts)
                call.open.append(piece)
                self._fleet.ranks[share.rank].dropped += 1
                self._failed(call, piece, share.rank, "its partial is not finite")
        if not call.open:
            raise RunError(f"layer {call.layer}: the routed sum overflows fp32 although every rank's share is finite")
        self._feed()

    def _failed(self, call: LayerCall, piece: Piece, rank: int, cause: str) -> None:
        """The piece has no answer: another rank tries it, unless it failed this way before."""
        log.warning("rank %d, layer %d, experts %s: %s", rank, call.layer, piece.experts, cause)
        if cause in piece.causes:
            raise RunError(f"layer {call.layer}, experts {_listed(piece.experts)}: failed on two attempts the same way: {cause}")
        piece.causes.append(cause)
        self.resends += 1
        self._fleet.ranks[rank].resends += 1
        others = [r for r in self._fleet.live() if r != rank] or self._fleet.live()
        if not others:
            call.homeless.append(piece)
            return
        call.open.remove(piece)
        self._deal_out(call, piece.experts, others, dict.fromkeys(piece.experts, piece.causes))

    def _lost(self, event: Lost) -> None:
        call = self._call
        owed = [piece for piece in event.pieces if call and piece in call.open]
        if call is None or not owed:
            return
        self.resends += len(owed)
        self._fleet.ranks[event.rank].resends += len(owed)
        if self._spec.on_loss == "wait" and event.dead:
            self._fleet.ranks[event.rank].queue.extend(owed)
        else:
            call.homeless.extend(owed)

    def _crashed(self, event: Crashed) -> None:
        """A process that crashed (and was not merely killed) on a call may crash the next one too: remember why."""
        call = self._call
        if self._fleet.ranks[event.rank].state == "gone" and call:
            call.homeless.extend(self._fleet.ranks[event.rank].queue)
            self._fleet.ranks[event.rank].queue.clear()
        if call is None or any(end in event.reason for end in ORDINARY_ENDS):
            return
        for lost in event.pieces:
            for piece in call.open:
                if set(piece.experts) & set(lost.experts):
                    if event.reason in piece.causes:
                        raise RunError(
                            f"layer {call.layer}, experts {_listed(piece.experts)}: two workers ended the same way: {event.reason}; "
                            f"see their logs"
                        )
                    piece.causes.append(event.reason)


def _listed(experts: list[int]) -> str:
    return " ".join(map(str, experts))
