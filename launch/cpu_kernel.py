"""Which expert kernel CPU workers get: decided once per launch, the fastest instruction set by measurement.

The decision is made in a process of its own (`python -m evrun.launch.cpu_kernel NAME`): native code that this machine
cannot run ends that process and not the launcher. No torch is imported: the torch kernel always runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from evrun.expert_worker.wire.errors import DEVICE, USAGE, DeviceError, EvrunError, UsageError
from evrun.launch.process import Exit, child_environment

AUTO, NATIVE, TORCH = "auto", "native", "torch"
WITHIN_S = 60.0


def choose(asked: str) -> tuple[str, str]:
    """(kernel for the workers' specs, why a better one is not used; empty when none is passed over).

    asked  `auto`, a backend of kernels.registry, or one with its variant, as in `native-avx2`
    Raises UsageError for an unknown name, DeviceError for one that was asked for and cannot run here.
    """
    if asked == TORCH:
        return TORCH, ""
    command = [sys.executable, "-m", "evrun.launch.cpu_kernel", asked]
    try:
        found = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd="/",
            env=child_environment(os.environ, 1),
            timeout=WITHIN_S,
        )
        kernel, passed_over, error, exit_code = json.loads(found.stdout)
    except subprocess.TimeoutExpired:
        return _without_native(asked, f"its trial took more than {WITHIN_S:g} s")
    except ValueError:
        words = found.stderr.strip().splitlines()
        return _without_native(asked, f"its trial {Exit.of(found.returncode)}{': ' + words[-1] if words else ''}")
    if error:
        raise (UsageError if exit_code == USAGE else DeviceError)(error)
    return kernel, passed_over


def decide(asked: str) -> tuple[str, str]:
    """`choose`, in this process."""
    from evrun.kernels import registry

    backend, _, variant = asked.partition("-")
    if asked == AUTO:
        backend = NATIVE
    elif backend not in registry.names() or (variant and backend != NATIVE):
        raise UsageError(f"--cpu-kernel: expected auto or one of {', '.join(registry.names())}, found {asked!r}")
    native = registry.module(NATIVE)
    reason = native.probe()
    if reason is not None:
        return _without_native(asked, reason)
    if variant:
        known = {v.name: v for v in native.variants()}
        if variant not in known:
            raise UsageError(f"--cpu-kernel: expected native with one of {', '.join(known)}, found {asked!r}")
        if not known[variant].supported:
            raise DeviceError(f"--cpu-kernel {asked}: this CPU has no {known[variant].description}; use --cpu-kernel auto")
        return asked, ""
    return f"{NATIVE}-{native.measure()}", ""


def _without_native(asked: str, reason: str) -> tuple[str, str]:
    if asked != AUTO:
        raise DeviceError(f"--cpu-kernel {asked}: cannot run here: {reason}; use --cpu-kernel auto")
    return TORCH, f"CPU kernel {NATIVE} is not used: {reason}; the {TORCH} kernel is, which is slower"


def _main(asked: str) -> None:
    try:
        answer = (*decide(asked), "", 0)
    except EvrunError as error:
        answer = ("", "", str(error), USAGE if isinstance(error, UsageError) else DEVICE)
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    _main(sys.argv[1])
