"""A call on a card: rows down the ladder, kernels on the packed codes, one drain at the end.

All copies of a call are issued before anything is waited for; the kernels of one run of experts read one half of the
staging memory while the next run's rows fill the other. Nothing is allocated per token. One token whose rows are on the
card, or known to lie in registered memory, costs one native function (`kernels/cuda/issue.py`): the kernel writes its result
straight into the reply memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evrun.expert_worker.card.inputs import Inputs
from evrun.expert_worker.card.rows import CardRows, staging_bytes
from evrun.expert_worker.card.trial import self_test_of
from evrun.expert_worker.rows import Rows
from evrun.expert_worker.spec import WorkerSpec
from evrun.expert_worker.timeline import Part
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.errors import DeviceError, PayloadError, RunError
from evrun.expert_worker.wire.link import Short
from evrun.expert_worker.wire.slots import ReplyMemory
from evrun.kernels import cuda, registry
from evrun.kernels.api import BadScaleError, Combine, FfnShape
from evrun.kernels.card_backend import CardBackend
from evrun.kernels.cuda import errors
from evrun.kernels.cuda.driver import REGISTER_MAPPED, REGISTER_PORTABLE, Registration
from evrun.kernels.cuda.issue import NativeIssue
from evrun.kernels.cuda.params import ROW_BYTES
from evrun.kernels.native.library import NativeLibraryError

RESERVE_BYTES = 1 << 30
"""Card memory left to others when the cache takes what is free."""
SPIN_S = 200e-6
"""Longest time that the wait for one token's kernels keeps a core busy, where every process has one."""
TAIL_OF_ONE, TAIL_OF_MANY = 1, 2
"""Rows of the last run of a call of one token, and of more: what is left to compute when the last byte has come."""
MANY_ARRAYS = 64
log = logging.getLogger("card")


class CardLane:
    """expert_worker.lane.Lane on one card."""

    def __init__(
        self, spec: WorkerSpec, checkpoint: Checkpoint, reply: ReplyMemory, beat: Callable[[], None],
        open_card: Callable[[str], cuda.CompilingDevice] | None = None,
    ) -> None:  # fmt: skip
        """Raises DeviceError: no driver, no such card, no memory, no compiler, a kernel that fails its self-test."""
        config, rows = checkpoint.config, Rows(checkpoint)
        self._rows, self._beat = rows, beat
        self._addresses: dict[int, tuple[npt.NDArray[Any], int]] = {}
        self._combine: Combine = "exact" if spec.combine == "exact" else "partial"
        self._itemsize = 2 if spec.dtype == "bfloat16" else 4
        self._hidden = config.hidden_size
        shape = FfnShape(
            config.hidden_size,
            config.moe_intermediate_size,
            config.swiglu_limit,
            "reference" if spec.numerics == "reference" else "weights-only",
            "bfloat16" if spec.dtype == "bfloat16" else "float32",
        )
        kernels = registry.card_module(spec.card_kernel)
        try:
            self._device: cuda.CompilingDevice = (open_card or kernels.CompilingDevice)(spec.device.partition(":")[2])
            self._kernel: CardBackend = kernels.create_on(
                self._device, shape, spec.prefill_chunk, config.num_experts_per_tok, Path(spec.cache_dir), config.n_routed_experts
            )
            beat()
            self._stream = self._device.stream()
            self._events = [self._device.event(), self._device.event()]
            self._inputs = Inputs(self._device, spec.prefill_chunk, config, self._itemsize)
            self._out = self._device.allocate(reply.layout.result_bytes)
            self._direct = self._register(reply)
            free, _ = self._device.memory_bytes()
            free -= RESERVE_BYTES + staging_bytes(config.row_bytes)
            cache_bytes = max(0, min(free, spec.card_cache_bytes if spec.card_cache_bytes >= 0 else free))
            self._ladder = CardRows(self._device, checkpoint, cache_bytes, spec.pin_budget_bytes, spec.threads, beat, spec.rungs)
            self._ladder.probe()
            self._one = self._native(spec) if self._direct is not None else None
            problem = self_test_of(self._device, self._kernel)
            if problem:
                raise DeviceError(f"kernel self-test of {self._kernel.name} on {self._device.name} failed: {problem}")
        except (errors.UnavailableError, errors.CompileError, errors.DeviceError) as error:
            raise DeviceError(f"rank {spec.rank}: {spec.device}: {error}; use --device cpu to do without this card") from error
        self.backend = f"{self._device.name} {self._kernel.name}"
        self.counts = self._ladder.counts
        self.short = self._without_python(config.row_bytes)
        slots = self._ladder.cache.slots
        log.info("card cache: %d rows, %.2f GiB", slots, slots * config.row_bytes / 2**30)

    @property
    def rung(self) -> str:
        return self._ladder.rung

    def compute(
        self, layer: int, experts: Sequence[int], x: npt.NDArray[Any], ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32],
        out: npt.NDArray[Any],
    ) -> int:  # fmt: skip
        """As CpuLane.compute. Raises RunError when the card fails: the process ends and is started again."""
        self._ladder.catch_up()
        try:
            slots = self._ladder.resident(layer, experts) if self._one and len(x) == 1 and len(experts) <= self._kernel.top_k else None
            if slots is not None:
                rows = self._resident(experts, slots, x, ids, weights, out)
            else:
                rows = self._issue(layer, experts, x, ids, weights, out)
                self._stream.synchronize()
            if self._kernel.suspicious:
                self._find_fault(layer, experts, x, ids, weights)
        except errors.DeviceError as error:
            raise RunError(f"layer {layer}, experts {' '.join(map(str, experts))}: the card failed: {error}") from error
        cache, counts = self._ladder.cache, self.counts
        counts["cache hits"], counts["cache misses"], counts["cache evictions"] = cache.hits, cache.misses, cache.evictions
        return rows

    def parts(self) -> list[Part]:
        """See Lane. The native way of one token issues and waits in one call, which counts as launch."""
        ladder, inputs, kernel = self._ladder, self._inputs, self._kernel
        copies = [Part(ladder, "bring_in", "upload"), *(Part(inputs, name, "upload") for name in ("write", "write_x", "send"))]
        kernels = [Part(kernel, "call", "launch"), Part(kernel, "call_single", "launch"), Part(self._one, "call", "launch")]
        return [*copies, *kernels, *ladder.staging_parts(), Part(self._stream, "synchronize", "drain")]

    def _resident(
        self, experts: Sequence[int], slots: Sequence[int], x: npt.NDArray[Any], ids: npt.NDArray[np.int32],
        weights: npt.NDArray[np.float32], out: npt.NDArray[Any],
    ) -> int:  # fmt: skip
        """One token whose rows are on the card: one native function."""
        assert self._one is not None
        x_at, ids_at, weights_at = map(self._address, (x, ids, weights))
        drawn = self._one.call(x_at, ids_at, weights_at, experts, slots, self._reply_on_card + self._result_at, self._combine == "exact")
        if drawn < 0:
            raise self._device.fail("evrun_card_call", -drawn)
        if drawn == 0:
            out[...] = 0
        return drawn

    def _address(self, array: npt.NDArray[Any]) -> int:
        """Of an array that comes again at every call: numpy takes a microsecond to say it."""
        known = self._addresses.get(id(array))
        if known is None or known[0] is not array:
            if len(self._addresses) >= MANY_ARRAYS:
                self._addresses.clear()
            known = self._addresses[id(array)] = array, array.ctypes.data
        return known[1]

    def _issue(
        self, layer: int, experts: Sequence[int], x: npt.NDArray[Any], ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32],
        out: npt.NDArray[Any],
    ) -> int:  # fmt: skip
        """Put the whole call on the streams; waits for nothing but arena pieces. Returns the pairs it computes."""
        tokens, stream = len(x), self._stream
        if tokens == 1 and self._kernel.single:
            return self._issue_single(layer, experts, x, ids, weights, out)
        draws = np.bincount(ids.ravel(), minlength=max(experts) + 1)
        card_x, card_ids, card_weights, card_experts, card_rows = self._inputs.write(x, ids, weights, experts)
        target = self._target(out, tokens)
        protected = {(layer, e) for e in experts}
        done = pairs = 0
        for number, run in enumerate(self._ladder.cut(layer, experts, TAIL_OF_MANY)):
            self._inputs.add_rows(self._ladder.table[self._ladder.bring_in([(layer, e) for e in run], number, stream, protected)])
            self._inputs.send(stream)
            to = target + pairs * self._hidden * self._itemsize if self._combine == "exact" else target
            table = card_experts + 4 * done, card_rows + ROW_BYTES * done
            self._kernel.call(stream, tokens, card_x, card_ids, card_weights, *table, len(run), to, self._combine, accumulate=done > 0)
            event = self._events[number % 2]
            event.record(stream)
            self._ladder.passed(number, event)
            done += len(run)
            pairs += int(draws[run].sum())
            self._beat()
        if target == self._out.address:
            rows = pairs if self._combine == "exact" else tokens
            self._device.copy_out(out.ctypes.data, target, rows * out.shape[1] * out.itemsize, stream)
        return pairs

    def _issue_single(
        self, layer: int, experts: Sequence[int], x: npt.NDArray[Any], ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32],
        out: npt.NDArray[Any],
    ) -> int:  # fmt: skip
        """`_issue` for one token. Its activations go first: behind rows they would arrive last."""
        stream, target, exact = self._stream, self._target(out, 1), self._combine == "exact"
        routes = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
        protected = {(layer, e) for e in experts}
        x_at = self._inputs.write_x(x, stream)
        pairs = 0
        for number, run in enumerate(self._ladder.cut(layer, experts, TAIL_OF_ONE)):
            slots = self._ladder.bring_in([(layer, e) for e in run], number, stream, protected)
            drawn = [(slot, routes[e]) for slot, e in zip(slots, run, strict=True) if e in routes]
            rows = self._ladder.table[[slot for slot, _ in drawn]]
            to = target + pairs * self._hidden * self._itemsize if exact else target
            self._kernel.call_single(stream, x_at, rows, [route for _, route in drawn], to, self._combine, accumulate=number > 0)
            event = self._events[number % 2]
            event.record(stream)
            self._ladder.passed(number, event)
            pairs += len(drawn)
            self._beat()
        if target == self._out.address:
            self._device.copy_out(out.ctypes.data, target, (pairs if exact else 1) * out.shape[1] * out.itemsize, stream)
        return pairs

    def _target(self, out: npt.NDArray[Any], tokens: int) -> int:
        """Where the kernels write: for one token straight into the reply memory, if the card can see it."""
        if tokens > 1 or self._direct is None:
            return self._out.address
        return self._direct + out.ctypes.data - self._reply_address

    def _register(self, reply: ReplyMemory) -> int | None:
        """The reply memory's address as the card sees it; None when it cannot be registered (results are copied then)."""
        view = np.frombuffer(reply.memory, np.uint8)
        self._reply_address = view.ctypes.data
        self._result_at = reply.partial(1).ctypes.data - self._reply_address
        try:
            self._registration: Registration = self._device.register(self._reply_address, view.nbytes, REGISTER_PORTABLE | REGISTER_MAPPED)
            self._reply_on_card = self._device.host_device_address(self._reply_address)
            return self._reply_on_card
        except errors.DeviceError as error:
            if error.lost:
                raise
            log.warning("results are copied instead of written in place: %s", error)
            return None

    def _native(self, spec: WorkerSpec) -> NativeIssue | None:
        """The short way for one token; None, with the reason in the log, where there is none."""
        single = self._kernel.single
        if single is None:
            return None
        pinned, card_x = self._inputs.native
        spin_s = SPIN_S if (os.cpu_count() or 1) > spec.world_size + 1 else 0.0
        try:
            return NativeIssue(
                self._device, single, self._kernel.top_k, self._stream, self._ladder.table, pinned, card_x,
                self._hidden * self._itemsize, spin_s,
            )  # fmt: skip
        except NativeLibraryError as error:
            log.warning("calls of one token take a longer way, about 0.1 ms each: %s", error)
            return None

    def _without_python(self, row_bytes: int) -> Short | None:
        """The short way as a worker serves it by itself (wire.link.ExpertPort.shorten)."""
        if self._one is None:
            return None
        table, counts = self._ladder.cache.table, self.counts
        notes = table.slots, table.used, table.num_used
        counted = row_bytes, counts.address_of("card"), counts.address_of("cache hits")
        out = self._reply_on_card + self._result_at
        exact = self._combine == "exact"
        return self._one.without_python(*notes, self._ladder.staging(), out, self._kernel.status_address, *counted, exact)

    def _find_fault(
        self, layer: int, experts: Sequence[int], x: npt.NDArray[Any], ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]
    ) -> None:
        """Compute the experts one by one until the bad one shows. Raises PayloadError."""
        self._kernel.forget()
        scratch = np.empty((x.size // self._hidden * ids.shape[1], self._hidden), np.float32)
        self._ladder.forget([(layer, e) for e in experts])
        for expert in experts:
            try:
                out = scratch[: len(x)] if self._combine == "partial" else scratch.view(x.dtype).reshape(-1, self._hidden)
                self._issue_apart(layer, expert, x, ids, weights, out)
            except BadScaleError as bad:
                self._ladder.forget([(layer, expert)])
                raise PayloadError(self._rows.describe(layer, expert, bad)) from bad
            except errors.NonFiniteError as error:
                raise PayloadError(f"layer {layer}, expert {expert}: {error}") from error
        raise PayloadError(f"layer {layer}, experts {' '.join(map(str, experts))}: the routed sum is not finite")

    def _issue_apart(
        self, layer: int, expert: int, x: npt.NDArray[Any], ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32],
        out: npt.NDArray[Any],
    ) -> None:  # fmt: skip
        direct, self._direct = self._direct, None
        try:
            self._issue(layer, [expert], x, ids, weights, out)
            self._stream.synchronize()
            self._kernel.check()
        finally:
            self._direct = direct
