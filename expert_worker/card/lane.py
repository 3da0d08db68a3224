"""A call on a card: rows down the ladder, kernels on the packed codes, one drain at the end.

All copies of a call are issued before anything is waited for; the kernels of one run of experts read one half of the
staging memory while the next run's rows fill the other. Nothing is allocated per token. One token whose rows are on the
card costs a copy of the input, a launch and a wait: the kernel writes its result straight into the reply memory.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evrun.expert_worker.card.rows import CardRows, staging_bytes
from evrun.expert_worker.card.trial import self_test_of
from evrun.expert_worker.rows import Rows
from evrun.expert_worker.spec import WorkerSpec
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.errors import DeviceError, PayloadError, RunError
from evrun.expert_worker.wire.slots import ReplyMemory
from evrun.kernels import cuda
from evrun.kernels.api import BadScaleError, Combine, FfnShape
from evrun.kernels.cuda import errors
from evrun.kernels.cuda.backend import CudaBackend
from evrun.kernels.cuda.driver import REGISTER_MAPPED, REGISTER_PORTABLE, Registration
from evrun.kernels.cuda.params import ROW_BYTES

RESERVE_BYTES = 1 << 30
"""Card memory left to others when the cache takes what is free."""
log = logging.getLogger("card")


class Inputs:
    """The input block of a call, once in pinned memory and once on the card: x, ids, weights, experts, row addresses."""

    def __init__(self, device: cuda.CompilingDevice, tokens: int, config: ModelConfig, itemsize: int) -> None:
        self._hidden, self._top_k, self._itemsize = config.hidden_size, config.num_experts_per_tok, itemsize
        self._experts = config.n_routed_experts
        size = self._offsets(tokens)[-1]
        self._device, self._host, self._card = device, device.pinned(size), device.allocate(size)

    def _offsets(self, tokens: int) -> list[int]:
        """Begin of x, ids, weights, experts, rows, and the end, in bytes."""
        sizes = (tokens * self._hidden * self._itemsize, *(2 * (tokens * self._top_k * 4,)), self._experts * 4, self._experts * ROW_BYTES)
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // 256) * 256)
        return offsets

    def write(self, x: npt.NDArray[Any], ids: npt.NDArray[Any], weights: npt.NDArray[Any], experts: Sequence[int]) -> list[int]:
        """Fill the pinned block, all but the row addresses. Returns the five addresses on the card."""
        offsets = self._offsets(len(x))
        for offset, values in zip(offsets, (x, ids, weights, np.asarray(experts, np.int32)), strict=False):
            ctypes.memmove(self._host.address + offset, values.ctypes.data, values.nbytes)
        self._rows_at, self._rows_done, self._sent = offsets[4], offsets[4], 0
        return [self._card.address + offset for offset in offsets[:5]]

    def add_rows(self, addresses: Sequence[tuple[int, ...]]) -> None:
        """Row addresses of the next run, behind those of the runs before."""
        table = np.asarray(addresses, np.uint64)
        ctypes.memmove(self._host.address + self._rows_done, table.ctypes.data, table.nbytes)
        self._rows_done += table.nbytes

    def send(self, stream: Any) -> None:
        """Copy what was written since the last send."""
        self._device.copy_in(self._card.address + self._sent, self._host.address + self._sent, self._rows_done - self._sent, stream)
        self._sent = self._rows_done

    def close(self) -> None:
        self._host.close()
        self._card.close()


class CardLane:
    """expert_worker.lane.Lane on one card."""

    def __init__(
        self, spec: WorkerSpec, checkpoint: Checkpoint, reply: ReplyMemory, beat: Callable[[], None],
        open_card: Callable[[str], cuda.CompilingDevice] = cuda.CompilingDevice,
    ) -> None:  # fmt: skip
        """Raises DeviceError: no driver, no such card, no memory, no compiler, a kernel that fails its self-test."""
        config, rows = checkpoint.config, Rows(checkpoint)
        self._rows, self._beat = rows, beat
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
        try:
            self._device = open_card(spec.device.partition(":")[2])
            self._kernel: CudaBackend = cuda.create_on(
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
            problem = self_test_of(self._device, self._kernel)
            if problem:
                raise DeviceError(f"kernel self-test of {self._kernel.name} on {self._device.name} failed: {problem}")
        except (errors.UnavailableError, errors.CompileError, errors.DeviceError) as error:
            raise DeviceError(f"rank {spec.rank}: {spec.device}: {error}; use --device cpu to do without this card") from error
        self.backend = f"{self._device.name} {self._kernel.name}"
        self.bytes_by_rung = self._ladder.bytes_by_rung
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
        try:
            rows = self._issue(layer, experts, x, ids, weights, out)
            self._stream.synchronize()
            self._kernel.check()
        except (BadScaleError, errors.NonFiniteError):
            self._find_fault(layer, experts, x, ids, weights)
            raise AssertionError("_find_fault always raises") from None
        except errors.DeviceError as error:
            raise RunError(f"layer {layer}, experts {' '.join(map(str, experts))}: the card failed: {error}") from error
        cache = self._ladder.cache
        self.bytes_by_rung |= {"cache hits": cache.hits, "cache misses": cache.misses, "cache evictions": cache.evictions}
        return rows

    def _issue(
        self, layer: int, experts: Sequence[int], x: npt.NDArray[Any], ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32],
        out: npt.NDArray[Any],
    ) -> int:  # fmt: skip
        """Put the whole call on the streams; waits for nothing but arena pieces. Returns the pairs it computes."""
        tokens, stream = len(x), self._stream
        draws = np.bincount(ids.ravel(), minlength=max(experts) + 1)
        card_x, card_ids, card_weights, card_experts, card_rows = self._inputs.write(x, ids, weights, experts)
        target = self._target(out, tokens)
        protected = {(layer, e) for e in experts}
        done = pairs = 0
        for number, run in enumerate(self._ladder.cut(layer, experts)):
            self._inputs.add_rows(self._ladder.bring_in([(layer, e) for e in run], number, stream, protected))
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

    def _target(self, out: npt.NDArray[Any], tokens: int) -> int:
        """Where the kernels write: for one token straight into the reply memory, if the card can see it."""
        if tokens > 1 or self._direct is None:
            return self._out.address
        return self._direct + out.ctypes.data - self._reply_address

    def _register(self, reply: ReplyMemory) -> int | None:
        """The reply memory's address as the card sees it; None when it cannot be registered (results are copied then)."""
        view = np.frombuffer(reply.memory, np.uint8)
        self._reply_address = view.ctypes.data
        try:
            self._registration: Registration = self._device.register(self._reply_address, view.nbytes, REGISTER_PORTABLE | REGISTER_MAPPED)
            return self._device.host_device_address(self._reply_address)
        except errors.DeviceError as error:
            if error.lost:
                raise
            log.warning("results are copied instead of written in place: %s", error)
            return None

    def _find_fault(
        self, layer: int, experts: Sequence[int], x: npt.NDArray[Any], ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]
    ) -> None:
        """Compute the experts one by one until the bad one shows. Raises PayloadError."""
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
