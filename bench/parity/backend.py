"""Who computes: a CPU kernel by name, or a card."""

from __future__ import annotations

from dataclasses import dataclass

from evrun.expert_worker.wire.errors import DeviceError, UsageError
from evrun.kernels import registry
from evrun.kernels.cuda import driver


@dataclass(frozen=True)
class Backend:
    """One kind of worker."""

    name: str
    kernel: str
    """For CPU workers: a name of kernels.registry, with or without a variant."""
    device: str
    """`cpu` or `cuda:GPU-<uuid>`."""


def parse(name: str) -> Backend:
    """`cpu`, `native`, `native-avx2`, `torch`, `cuda` or `cuda:1`. Raises UsageError, DeviceError (what cannot run here),
    UnavailableError (no driver)."""
    kind, _, which = name.partition(":")
    if kind == "cuda" and (which.isdigit() or not which):
        uuids = driver.device_uuids()
        if int(which or 0) >= len(uuids):
            raise DeviceError(f"{name}: this machine shows {len(uuids)} card(s), numbered from 0")
        return Backend(name, registry.choose()[0], f"cuda:{uuids[int(which or 0)]}")
    if name == "cpu":
        return Backend(name, registry.choose()[0], "cpu")
    kernel, _, variant = name.partition("-")
    if kernel not in registry.names() or (variant and kernel != "native"):
        raise UsageError(f"{name}: expected cpu, cuda, cuda:K, torch, native or native-VARIANT")
    reason = registry.module(kernel).probe()
    if reason:
        raise DeviceError(f"{name}: cannot run here: {reason}")
    known = {v.name: v.supported for v in registry.module(kernel).variants()} if variant else {}
    if variant and not known.get(variant, False):
        there = ", ".join(f"native-{v}" for v, supported in known.items() if supported)
        raise DeviceError(f"{name}: this CPU has no such kernel; it has {there}")
    return Backend(name, name, "cpu")
