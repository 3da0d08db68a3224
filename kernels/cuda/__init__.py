"""Routed experts on NVIDIA cards: CUDA C++ compiled at run time with NVRTC, driven through ctypes. No torch, no nvcc.

`probe` says whether this process could use a card, `create` makes a `backend.CudaBackend` on one.
"""

from __future__ import annotations

from pathlib import Path

from evrun.kernels.api import FfnShape
from evrun.kernels.cuda import nvrtc
from evrun.kernels.cuda.backend import CudaBackend
from evrun.kernels.cuda.compile import Unit, architecture_for, compiled
from evrun.kernels.cuda.driver import Device, Kernel, Module, device_uuids, driver_version
from evrun.kernels.cuda.errors import UnavailableError
from evrun.kernels.cuda.plan import check_card


class CompilingDevice(Device):
    """A card that compiles what it runs."""

    def __init__(self, uuid: str | None = None) -> None:
        super().__init__(uuid)
        self._modules: dict[Unit, Module] = {}

    def kernel(self, unit: Unit, name: str, shared_bytes: int, cache: Path) -> Kernel:
        """Raises UnavailableError (no compiler), CompileError, DeviceError (code that this driver cannot load)."""
        if unit not in self._modules:
            version = driver_version()
            compiler = nvrtc.load(version[0])
            code = compiled(unit, architecture_for(self.limits.capability, compiler), compiler, version[0] * 1000 + version[1], cache)
            self._modules[unit] = self.load(code)
        return self._modules[unit].kernel(name, shared_bytes)


def probe() -> str | None:
    """None, or why no card can be used here. Makes no context."""
    try:
        if not device_uuids():
            return "no card is visible"
        nvrtc.load(driver_version()[0])
    except UnavailableError as error:
        return str(error)
    return None


def create(shape: FfnShape, max_tokens: int, top_k: int, device_uuid: str | None, cache_dir: Path, num_experts: int = 1024) -> CudaBackend:
    """A backend on the card with this UUID (None: the first visible one), current in this thread.

    Raises UnavailableError (card, compiler, capability, geometry), CompileError, DeviceError.
    """
    return create_on(CompilingDevice(device_uuid), shape, max_tokens, top_k, cache_dir, num_experts)


def create_on(
    device: CompilingDevice, shape: FfnShape, max_tokens: int, top_k: int, cache_dir: Path, num_experts: int = 1024
) -> CudaBackend:
    """As `create`, on a device that the caller keeps for its own copies and streams."""
    check_card(shape, device.name, device.limits)
    return CudaBackend(device, shape, max_tokens, top_k, num_experts, cache_dir)
