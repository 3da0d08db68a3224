"""Which expert kernel CPU workers get, decided once per launch. Imports no torch: the torch kernel always runs."""

from __future__ import annotations

from evrun.expert_worker.wire.errors import DeviceError, UsageError
from evrun.kernels import registry

TORCH = "torch"


def choose(asked: str) -> tuple[str, str]:
    """(kernel for the workers' specs, why a better one is not used; empty when none is passed over).

    asked  `auto`, a backend of kernels.registry, or one with its variant, as in `native-avx2`
    Raises UsageError for an unknown name, DeviceError for one that was asked for and cannot run here.
    """
    backend = "native" if asked == "auto" else asked.partition("-")[0]
    if backend not in registry.names():
        raise UsageError(f"--cpu-kernel: expected auto or one of {', '.join(registry.names())}, found {asked!r}")
    if backend == TORCH:
        return asked, ""
    probe = getattr(registry.module(backend), "probe", None)
    reason = probe() if probe is not None else "not in this build"
    if reason is None:
        return (backend if asked == "auto" else asked), ""
    if asked != "auto":
        raise DeviceError(f"--cpu-kernel {asked}: cannot run here: {reason}; use --cpu-kernel auto")
    return TORCH, f"CPU kernel {backend} is not used: {reason}; the {TORCH} kernel is, which is slower"
