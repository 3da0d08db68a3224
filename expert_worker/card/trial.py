"""The kernels of a card against a CPU backend before anything relies on them: here, and `python -m` for the launcher.

    python -m evrun.expert_worker.card.trial UUID CACHE_DIR TOP_K NUM_EXPERTS HIDDEN INTERMEDIATE LIMIT NUMERICS DTYPE KERNEL

prints one line: `ok SIBLING NAME`, or why this card cannot be used; further lines say why a preferred sibling is not
used. KERNEL is `auto` or a name of `registry.card_names`. The launcher asks in a process of its own, so that neither
a CUDA context nor a fault of a driver stays with it; compiled kernels stay in CACHE_DIR for the workers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evrun.kernels import cuda, registry, self_test
from evrun.kernels.api import FfnShape, Row
from evrun.kernels.card_backend import CardBackend
from evrun.kernels.cuda import errors

MAX_TOKENS = self_test.TOKENS


class Trial:
    """One row of the run's own size, brought to the card from ordinary memory."""

    def __init__(self, device: cuda.CompilingDevice, kernel: CardBackend, row: Row) -> None:
        self._device, self._kernel = device, kernel
        self._stream = device.stream()
        self._held: list[Any] = []
        self._row = np.array([self._put(part) for part in row], np.uint64)

    def run(self, x: npt.NDArray[Any], ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """kernels.api's function for x [T, H]; ids [T, 1] are all 0, the row."""
        tokens, top_k, hidden = len(x), self._kernel.top_k, self._kernel.shape.hidden
        out = np.zeros((tokens, hidden), np.float32)
        target = self._put(out)
        if tokens == 1 and self._kernel.single:
            self._kernel.call_single(self._stream, self._put(x), self._row[None], [float(weights[0, 0])], target, "partial")
            return self._get(target, out)
        all_ids = np.full((tokens, top_k), -1, np.int32)
        all_weights = np.zeros((tokens, top_k), np.float32)
        all_ids[:, :1], all_weights[:, :1] = ids, weights
        card_x, card_ids, card_weights = self._put(x), self._put(all_ids), self._put(all_weights)
        experts, rows = self._put(np.zeros(1, np.int32)), self._put(self._row)
        self._kernel.call(self._stream, tokens, card_x, card_ids, card_weights, experts, rows, 1, target, "partial")
        return self._get(target, out)

    def close(self) -> None:
        for memory in self._held:
            memory.close()
        self._stream.close()

    def _get(self, address: int, out: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        self._device.copy_out(out.ctypes.data, address, out.nbytes, self._stream)
        self._stream.synchronize()
        self._kernel.check()
        return out

    def _put(self, array: npt.NDArray[Any]) -> int:
        memory = self._device.allocate(array.nbytes)
        self._held.append(memory)
        self._device.copy_in(memory.address, array.ctypes.data, array.nbytes, self._stream)
        self._stream.synchronize()
        return int(memory.address)


def self_test_of(device: cuda.CompilingDevice, kernel: CardBackend) -> str | None:
    """None, or what the kernels compute wrongly: one token, and several."""
    shape = kernel.shape
    row = self_test.random_row(shape)
    name, _ = registry.choose()
    reference = registry.create(name, shape, self_test.TOKENS, 1, 1, [0])
    trial = Trial(device, kernel, row)
    try:
        for tokens in {1, min(self_test.TOKENS, kernel.max_tokens)}:
            problem = self_test.compare(trial.run, reference.call, shape, row, tokens)
            if problem:
                return problem
        return None
    finally:
        trial.close()


def main(arguments: Sequence[str]) -> str:
    uuid, cache_dir, top_k, num_experts, hidden, intermediate, limit, numerics, dtype, asked = arguments
    shape = FfnShape(int(hidden), int(intermediate), float(limit), numerics, dtype)  # type: ignore[arg-type]
    try:
        sibling, passed_over = registry.choose_card(asked)
        kernels = registry.card_module(sibling)
        device = kernels.CompilingDevice(uuid)
        kernel = kernels.create_on(device, shape, MAX_TOKENS, int(top_k), Path(cache_dir), int(num_experts))
        problem = self_test_of(device, kernel)
    except (errors.UnavailableError, errors.CompileError, errors.DeviceError, registry.UnknownBackendError) as error:
        return str(error).splitlines()[0]
    if problem:
        return f"kernel self-test of {kernel.name} failed: {problem}"
    return "\n".join([f"ok {sibling} {device.name} {kernel.name}", *passed_over])


if __name__ == "__main__":
    print(main(sys.argv[1:]))  # noqa: T201 (its answer)
