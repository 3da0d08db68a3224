from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from evrun.expert_worker.wire.errors import DeviceError, UsageError
from evrun.kernels import registry
from evrun.launch import cpu_kernel
from evrun.launch.cpu_kernel import choose, decide

VARIANTS = [
    SimpleNamespace(name="scalar", description="plain", supported=True),
    SimpleNamespace(name="amx", description="AMX", supported=False),
]


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(probe=lambda: None, variants=lambda: VARIANTS, measure=lambda: "scalar")
    monkeypatch.setattr(registry, "module", lambda name: module)
    return module


def test_the_fastest_variant_by_measurement(native: SimpleNamespace) -> None:
    assert decide("auto") == decide("native") == ("native-scalar", "")
    assert decide("native-scalar") == ("native-scalar", "")


def test_a_variant_that_is_not_there(native: SimpleNamespace) -> None:
    with pytest.raises(DeviceError, match="--cpu-kernel native-amx: this CPU has no AMX"):
        decide("native-amx")
    with pytest.raises(UsageError, match="expected native with one of scalar, amx"):
        decide("native-sse9")
    with pytest.raises(UsageError, match="expected auto or one of native, torch, found 'fast'"):
        decide("fast")


def test_without_the_library(native: SimpleNamespace) -> None:
    native.probe = lambda: "libevrun_native.so not found"
    kernel, passed_over = decide("auto")
    assert kernel == "torch"
    assert "native is not used: libevrun_native.so not found; the torch kernel is" in passed_over
    with pytest.raises(DeviceError, match=r"--cpu-kernel native: cannot run here: libevrun_native.so not found"):
        decide("native")


def test_a_process_of_its_own_decides() -> None:
    kernel, passed_over = choose("auto")
    assert kernel.startswith("native-") or "native is not used" in passed_over
    assert choose("torch") == ("torch", "")
    with pytest.raises(UsageError, match="found 'fast'"):
        choose("fast")


def test_native_code_that_this_machine_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = cpu_kernel.subprocess.run
    code = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"

    def broken(command: list[str], **options: Any) -> Any:
        return run([command[0], "-c", code], **options)

    monkeypatch.setattr(cpu_kernel.subprocess, "run", broken)
    kernel, passed_over = choose("auto")
    assert kernel == "torch"
    assert "its trial killed by SIGILL" in passed_over
    with pytest.raises(DeviceError, match="killed by SIGILL"):
        choose("native-avx2")
