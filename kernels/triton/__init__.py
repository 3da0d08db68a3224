"""Routed experts on NVIDIA cards in Triton, for machines where the `cuda` sibling cannot run or is not wanted.

Triton compiles in a process of its own; the machine code runs through the sibling's driver. A worker imports neither
torch nor triton. Same functions as in `cuda`: `probe`, `create`, `create_on`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evrun.kernels.api import FfnShape
from evrun.kernels.cuda.driver import Device, Kernel, Stream, device_uuids, driver_version
from evrun.kernels.cuda.errors import UnavailableError
from evrun.kernels.cuda.plan import check_card
from evrun.kernels.triton import compile as compiling
from evrun.kernels.triton.backend import TritonBackend
from evrun.kernels.triton.compile import Code
from evrun.kernels.triton.params import Call, addresses
from evrun.kernels.triton.plan import Unit


class LoadedKernel:
    """One kernel with the structure that it takes its parameters from."""

    def __init__(self, kernel: Kernel, warps: int, code: Code, call: Call) -> None:
        self._kernel, self._threads = kernel, warps * 32
        self._call, self._parameters = call, addresses(call, code.parameters, code.unused)

    def launch(self, blocks: int, stream: Stream) -> None:
        self._kernel.launch_with(blocks, self._threads, stream, self._parameters)


class CompilingDevice(Device):
    """A card that compiles what it runs."""

    def kernels(self, units: Sequence[Unit], call: Call, cache: Path) -> list[LoadedKernel]:
        """Raises UnavailableError (no Triton), CompileError, DeviceError (code that this driver cannot load)."""
        version = driver_version()
        codes = compiling.compiled(units, self.limits.capability, version[0] * 1000 + version[1], cache)
        return [
            LoadedKernel(self.load(code.cubin).kernel(code.name, code.shared_bytes), unit.warps, code, call)
            for unit, code in zip(units, codes, strict=True)
        ]


def probe() -> str | None:
    """None, or why no card can be used here. Makes no context."""
    try:
        compiling.version()
        return None if device_uuids() else "no card is visible"
    except UnavailableError as error:
        return str(error)


def create(
    shape: FfnShape, max_tokens: int, top_k: int, device_uuid: str | None, cache_dir: Path, num_experts: int = 1024
) -> TritonBackend:
    """As `cuda.create`."""
    return create_on(CompilingDevice(device_uuid), shape, max_tokens, top_k, cache_dir, num_experts)


def create_on(
    device: CompilingDevice, shape: FfnShape, max_tokens: int, top_k: int, cache_dir: Path, num_experts: int = 1024
) -> TritonBackend:
    """As `cuda.create_on`."""
    check_card(shape, device.name, device.limits)
    return TritonBackend(device, shape, max_tokens, top_k, num_experts, cache_dir)
