"""The driver binding: what it says without a card, and registration, graphs and lost contexts on one."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from evrun.kernels import cuda
from evrun.kernels.cuda import driver, nvrtc
from evrun.kernels.cuda.errors import DeviceError, UnavailableError

REASON = cuda.probe()
on_card = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=f"no card: {REASON}")]


@pytest.fixture
def device() -> Iterator[cuda.CompilingDevice]:
    device = cuda.CompilingDevice()
    yield device
    device.close()


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(driver, "_LIBRARY", "libcuda-of-nobody.so.1")
    driver._library.cache_clear()
    yield
    driver._library.cache_clear()


@pytest.mark.usefixtures("no_driver")
def test_without_a_driver() -> None:
    assert "CUDA driver not loadable" in str(cuda.probe())
    with pytest.raises(UnavailableError, match="driver not loadable"):
        cuda.CompilingDevice()


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(["/nowhere/libnvrtc.so.12"]))
    nvrtc.load.cache_clear()
    with pytest.raises(UnavailableError, match=r"NVRTC 12\.0 or newer, at most 12\.x.*pip install nvidia-cuda-nvrtc-cu12"):
        nvrtc.load(12)
    nvrtc.load.cache_clear()


def test_error_text() -> None:
    error = DeviceError("cuMemAlloc_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
    assert str(error) == "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"
    assert "lost" in str(DeviceError("cuStreamSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS", lost=True))


class TestOnCard:
    pytestmark = on_card

    def test_unknown_card(self) -> None:
        with pytest.raises(UnavailableError, match="GPU-0000 is not visible; visible: GPU-"):
            cuda.CompilingDevice("GPU-0000")

    def test_same_card_by_uuid(self, device: cuda.CompilingDevice) -> None:
        again = cuda.CompilingDevice(device.uuid)
        assert again.name == device.name
        assert again.limits == device.limits
        again.close()

    def test_copies_from_a_registered_read_only_mapping(self, device: cuda.CompilingDevice, tmp_path: Path) -> None:
        if not device.attribute("host_register_read_only"):
            pytest.skip("this driver does not register read-only mappings")
        content = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
        (tmp_path / "shard").write_bytes(content.tobytes())
        with (tmp_path / "shard").open("rb") as file:
            mapping = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
        registered = device.register(mapping.ctypes.data, mapping.nbytes, driver.REGISTER_READ_ONLY)
        memory, stream, back = device.allocate(content.nbytes), device.stream(), np.zeros_like(content)
        device.copy_in(memory.address, mapping.ctypes.data, content.nbytes, stream)
        device.copy_out(back.ctypes.data, memory.address, content.nbytes, stream)
        stream.synchronize()
        np.testing.assert_array_equal(back, content)
        registered.close()
        memory.close()

    def test_a_refused_registration_does_not_stick(self, device: cuda.CompilingDevice) -> None:
        with pytest.raises(DeviceError) as refused:
            device.register(4096, 0, 0)
        assert not refused.value.lost
        device.allocate(16).close()

    def test_out_of_memory(self, device: cuda.CompilingDevice) -> None:
        with pytest.raises(DeviceError, match="OUT_OF_MEMORY") as refused:
            device.allocate(1 << 50)
        assert not refused.value.lost

    def test_graph_repeats_what_was_captured(self, device: cuda.CompilingDevice) -> None:
        stream, memory, host = device.stream(), device.allocate(4), ctypes.c_uint32()
        with device.capture(stream) as graph:
            device.fill(memory.address, 0x5A, 4, stream)
        device.fill(memory.address, 0, 4, stream)
        graph.launch(stream)
        device.copy_out(ctypes.addressof(host), memory.address, 4, stream)
        stream.synchronize()
        assert host.value == 0x5A5A5A5A
        graph.close()

    def test_events_order_streams(self, device: cuda.CompilingDevice) -> None:
        first, second, memory, host = device.stream(), device.stream(), device.allocate(4), ctypes.c_uint32()
        event = device.event()
        device.fill(memory.address, 1, 4, first)
        event.record(first)
        second.wait(event)
        device.copy_out(ctypes.addressof(host), memory.address, 4, second)
        second.synchronize()
        assert event.done()
        assert host.value == 0x01010101

    def test_a_lost_context_says_so_ever_after(self, tmp_path: Path) -> None:
        """In a process of its own, which loses its context to a bad address."""
        script = """
import sys
from pathlib import Path
from evrun.kernels import cuda
from evrun.kernels.api import FfnShape
from evrun.kernels.cuda.errors import DeviceError
device = cuda.CompilingDevice()
backend = cuda.create_on(device, FfnShape(256, 128, 3.0, "reference", "bfloat16"), 2, 3, Path(sys.argv[1]), 8)
stream = device.stream()
def call():
    backend.call(stream, 2, 16, 16, 16, 16, 16, 1, 16, "partial")  # one of its later launches may already say it
    stream.synchronize()
for attempt in (call, lambda: device.allocate(16)):
    try:
        attempt()
    except DeviceError as error:
        print(error.lost, error)
"""
        cache = os.environ.get("EVRUN_TEST_CUBINS", str(tmp_path))
        done = subprocess.run([sys.executable, "-c", script, cache], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) == 2
        assert lines[0] == lines[1]
        assert lines[0].startswith("True ")
