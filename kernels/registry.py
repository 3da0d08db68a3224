"""Kernel backends by name: of CPU workers, and of cards. A module is imported when it is asked for, never before.

A backend module has probe() -> None or the reason it cannot run here. A CPU's has create(...) -> kernels.api.CpuBackend;
a card's has CompilingDevice(uuid) and create_on(device, ...), whose result is a card_backend.CardBackend.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

from evrun.kernels.api import CpuBackend, FfnShape

_MODULES = {"native": "evrun.kernels.native", "torch": "evrun.kernels.reference"}
"""In the order of preference."""
_CARD_MODULES = {"cuda": "evrun.kernels.cuda", "triton": "evrun.kernels.triton"}
"""The same for cards."""


class UnknownBackendError(ValueError):
    """No backend of this name; the message lists the known ones."""


def names() -> list[str]:
    return list(_MODULES)


def module(name: str) -> ModuleType:
    if name not in _MODULES:
        raise UnknownBackendError(f"kernel backend {name!r}: unknown; known: {', '.join(_MODULES)}")
    return importlib.import_module(_MODULES[name])


def card_names() -> list[str]:
    return list(_CARD_MODULES)


def card_module(name: str) -> ModuleType:
    if name not in _CARD_MODULES:
        raise UnknownBackendError(f"card kernel {name!r}: unknown; known: {', '.join(_CARD_MODULES)}")
    return importlib.import_module(_CARD_MODULES[name])


def choose_card(name: str = "auto") -> tuple[str, list[str]]:
    """As `choose`, for a card. Raises UnknownBackendError when none can run here, too: a card has no last resort."""
    passed_over: list[str] = []
    for candidate in _CARD_MODULES if name == "auto" else [name]:
        reason = card_module(candidate).probe()
        if reason is None:
            return candidate, passed_over
        passed_over.append(f"{candidate}: {reason}")
    raise UnknownBackendError(f"no card kernel can run here: {'; '.join(passed_over)}")


def choose(name: str = "auto") -> tuple[str, list[str]]:
    """The backend to use and, one line each, why a preferred one is not: (`torch`, [`native: library not built ...`])."""
    if name != "auto":
        reason = module(name).probe()
        if reason:
            raise UnknownBackendError(f"kernel backend {name!r} cannot run here: {reason}")
        return name, []
    passed_over: list[str] = []
    for candidate in _MODULES:
        reason = module(candidate).probe()
        if reason is None:
            return candidate, passed_over
        passed_over.append(f"{candidate}: {reason}")
    raise AssertionError("the torch reference always runs")


def create(
    name: str, shape: FfnShape, max_tokens: int, top_k: int, threads: int, cpus: Sequence[int], variant: str | None = None
) -> CpuBackend:
    """Make a backend once per worker. `variant` picks an instruction set of `native`."""
    options = {"variant": variant} if variant else {}
    backend: CpuBackend = module(name).create(shape, max_tokens, top_k, threads, cpus=cpus, **options)
    return backend
