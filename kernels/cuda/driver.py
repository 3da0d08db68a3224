"""The CUDA driver through ctypes: one card of this process, its memory, streams, events, modules and graphs.

Nothing of CUDA needs to be installed but the driver itself (`libcuda.so.1`). Calls release the GIL. Every failure is a
DeviceError; one that sticks to the context also marks the Device as lost, and later calls repeat the first cause.
"""

from __future__ import annotations

import ctypes
import functools
import uuid as uuids
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from evrun.kernels.cuda.errors import DeviceError, UnavailableError

_LIBRARY = "libcuda.so.1"
_STICKY = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 807, 808})
"""Errors after which a context is dead: uncorrectable memory, illegal addresses and instructions, time-outs, failed launches."""

REGISTER_PORTABLE = 0x01
REGISTER_MAPPED = 0x02
REGISTER_READ_ONLY = 0x08
_EVENT_DISABLE_TIMING = 0x02
_STREAM_NON_BLOCKING = 0x01
_CAPTURE_RELAXED = 2
_ATTRIBUTES = {
    "multiprocessors": 16,
    "clock_khz": 13,
    "capability_major": 75,
    "capability_minor": 76,
    "shared_bytes_per_block": 97,
    "l2_bytes": 38,
    "cooperative_launch": 95,
    "host_register_read_only": 113,
}
_FUNCTION_MAX_DYNAMIC_SHARED = 8


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise UnavailableError(f"CUDA driver not loadable: {error}") from None
    code = library.cuInit(0)
    if code:
        raise UnavailableError(f"CUDA driver does not start: {_error_name(library, code)} ({code})")
    return library


def _error_name(library: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    library.cuGetErrorName(code, ctypes.byref(name))
    return (name.value or b"unknown error").decode()


def driver_version() -> tuple[int, int]:
    """The CUDA version that the driver speaks. Raises UnavailableError."""
    version = ctypes.c_int()
    _library().cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def device_uuids() -> list[str]:
    """`GPU-...` of the visible cards, in their order. Raises UnavailableError."""
    library, count = _library(), ctypes.c_int()
    code = library.cuDeviceGetCount(ctypes.byref(count))
    if code:
        raise UnavailableError(f"cards cannot be counted: {_error_name(library, code)} ({code})")
    found = []
    for index in range(count.value):
        raw = (ctypes.c_ubyte * 16)()
        library.cuDeviceGetUuid_v2(raw, index)
        found.append(f"GPU-{uuids.UUID(bytes=bytes(raw))}")
    return found


@dataclass(frozen=True)
class Limits:
    """What a plan needs to know of a card."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes_per_block: int


class Stream:
    """Work in order; does not wait for the default stream."""

    def __init__(self, device: Device) -> None:
        self._device, self.handle = device, ctypes.c_void_p()
        device.call("cuStreamCreate", ctypes.byref(self.handle), _STREAM_NON_BLOCKING)

    def synchronize(self) -> None:
        self._device.call("cuStreamSynchronize", self.handle)

    def wait(self, event: Event) -> None:
        """Later work of this stream starts after the event."""
        self._device.call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def close(self) -> None:
        self._device.call("cuStreamDestroy_v2", self.handle)


class Event:
    """A place in a stream. `timing` allows `milliseconds_since`."""

    def __init__(self, device: Device, timing: bool = False) -> None:
        self._device, self.handle = device, ctypes.c_void_p()
        device.call("cuEventCreate", ctypes.byref(self.handle), 0 if timing else _EVENT_DISABLE_TIMING)

    def record(self, stream: Stream) -> None:
        self._device.call("cuEventRecord", self.handle, stream.handle)

    def done(self) -> bool:
        return self._device.call("cuEventQuery", self.handle, allowed=(600,)) == 0

    def synchronize(self) -> None:
        self._device.call("cuEventSynchronize", self.handle)

    def milliseconds_since(self, start: Event) -> float:
        value = ctypes.c_float()
        self._device.call("cuEventElapsedTime", ctypes.byref(value), start.handle, self.handle)
        return value.value

    def close(self) -> None:
        self._device.call("cuEventDestroy_v2", self.handle)


class Memory:
    """Device memory."""

    def __init__(self, device: Device, size_bytes: int) -> None:
        self._device, self.size_bytes = device, size_bytes
        pointer = ctypes.c_uint64()
        device.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(size_bytes, 16)))
        self.address = pointer.value

    def close(self) -> None:
        if self.address:
            self._device.call("cuMemFree_v2", ctypes.c_uint64(self.address))
            self.address = 0


class PinnedMemory:
    """Host memory that the card reads and writes. `array`: its bytes; `device_address`: where the card sees it."""

    def __init__(self, device: Device, size_bytes: int) -> None:
        self._device, self.size_bytes = device, size_bytes
        pointer = ctypes.c_void_p()
        device.call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(size_bytes), REGISTER_PORTABLE | REGISTER_MAPPED)
        self.address = pointer.value or 0
        self.device_address = device.host_device_address(self.address)
        self.array: npt.NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(self.address))

    def close(self) -> None:
        if self.address:
            self._device.call("cuMemFreeHost", ctypes.c_void_p(self.address))
            self.address = 0


class Registration:
    """A host range that the card may copy from at the link's full rate. Page-aligned; nothing of it is copied or touched."""

    def __init__(self, device: Device, address: int, size_bytes: int, flags: int) -> None:
        self._device, self.address, self.size_bytes = device, address, size_bytes
        device.call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), flags)

    def close(self) -> None:
        if self.address:
            self._device.call("cuMemHostUnregister", ctypes.c_void_p(self.address))
            self.address = 0


class Kernel:
    """One function of a loaded module. The parameter structure is copied at launch."""

    def __init__(self, device: Device, module: ctypes.c_void_p, name: str, shared_bytes: int) -> None:
        self._device, self.name, self._shared = device, name, shared_bytes
        self._function = ctypes.c_void_p()
        device.call("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())
        device.call("cuFuncSetAttribute", self._function, _FUNCTION_MAX_DYNAMIC_SHARED, shared_bytes)

    @property
    def function(self) -> ctypes.c_void_p:
        """The driver's handle."""
        return self._function

    def blocks_per_multiprocessor(self, threads: int) -> int:
        count = ctypes.c_int()
        query = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        self._device.call(query, ctypes.byref(count), self._function, threads, ctypes.c_size_t(self._shared))
        return count.value

    def launch(self, blocks: int, threads: int, stream: Stream, params: ctypes.Structure, cooperative: bool = False) -> None:
        self.launch_with(blocks, threads, stream, (ctypes.c_void_p * 1)(ctypes.addressof(params)), cooperative)

    def launch_with(
        self, blocks: int, threads: int, stream: Stream, parameters: ctypes.Array[ctypes.c_void_p], cooperative: bool = False
    ) -> None:
        """`parameters`: the address of each parameter, which is copied at launch."""
        grid = (blocks, 1, 1, threads, 1, 1, self._shared, stream.handle, parameters)
        if cooperative:
            self._device.call("cuLaunchCooperativeKernel", self._function, *grid)
        else:
            self._device.call("cuLaunchKernel", self._function, *grid, None)


class Graph:
    """What a stream was given during `Device.capture`, to be launched again at the price of one launch."""

    def __init__(self, device: Device) -> None:
        self._device, self._executable = device, ctypes.c_void_p()

    def instantiate(self, graph: ctypes.c_void_p) -> None:
        self._device.call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), graph, ctypes.c_uint64(0))
        self._device.call("cuGraphDestroy", graph)

    def launch(self, stream: Stream) -> None:
        self._device.call("cuGraphLaunch", self._executable, stream.handle)

    def close(self) -> None:
        self._device.call("cuGraphExecDestroy", self._executable)


class Device:
    """A card and this process's primary context on it. `uuid` None: the first visible card.

    Raises UnavailableError (no driver, no such card), DeviceError (the context cannot be made: no memory, ...).
    """

    def __init__(self, uuid: str | None = None) -> None:
        self._driver = _library()
        self.lost: DeviceError | None = None
        visible = device_uuids()
        if uuid not in visible and (uuid is not None or not visible):
            raise UnavailableError(f"card {uuid or '0'} is not visible; visible: {', '.join(visible) or 'none'}")
        self.uuid = uuid or visible[0]
        self._ordinal = visible.index(self.uuid)
        self._context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._ordinal)
        self.use()
        name = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", name, len(name), self._ordinal)
        self.name = name.value.decode()

    def call(self, function: str, *arguments: Any, allowed: tuple[int, ...] = ()) -> int:
        """One driver call: 0, or a code in `allowed`. Raises DeviceError."""
        if self.lost:
            raise self.lost
        code: int = getattr(self._driver, function)(*arguments)
        if code == 0 or code in allowed:
            return code
        raise self.fail(function, code)

    def address_of(self, function: str) -> int:
        """Where a function of the driver lies, for native code."""
        return ctypes.cast(getattr(self._driver, function), ctypes.c_void_p).value or 0

    def fail(self, function: str, code: int) -> DeviceError:
        """What a driver call that native code made says; sticks as in `call`."""
        text = ctypes.c_char_p()
        self._driver.cuGetErrorString(code, ctypes.byref(text))
        lost = code in _STICKY
        error = DeviceError(function, code, _error_name(self._driver, code), (text.value or b"").decode(), lost)
        if lost:
            self.lost = error
        return error

    def use(self) -> None:
        """Make the card current in the calling thread; every thread that uses it does so once."""
        self.call("cuCtxSetCurrent", self._context)

    def attribute(self, name: str) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), _ATTRIBUTES[name], self._ordinal)
        return value.value

    @property
    def limits(self) -> Limits:
        capability = self.attribute("capability_major"), self.attribute("capability_minor")
        return Limits(capability, self.attribute("multiprocessors"), self.attribute("shared_bytes_per_block"))

    def memory_bytes(self) -> tuple[int, int]:
        """(free, total)"""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def stream(self) -> Stream:
        return Stream(self)

    def event(self, timing: bool = False) -> Event:
        return Event(self, timing)

    def allocate(self, size_bytes: int) -> Memory:
        return Memory(self, size_bytes)

    def pinned(self, size_bytes: int) -> PinnedMemory:
        return PinnedMemory(self, size_bytes)

    def register(self, address: int, size_bytes: int, flags: int) -> Registration:
        return Registration(self, address, size_bytes, flags)

    def host_device_address(self, address: int) -> int:
        """Where the card sees pinned or (mapped) registered host memory."""
        pointer = ctypes.c_uint64()
        self.call("cuMemHostGetDevicePointer_v2", ctypes.byref(pointer), ctypes.c_void_p(address), 0)
        return pointer.value

    def copy_in(self, to: int, host: int, size_bytes: int, stream: Stream) -> None:
        self.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(to), ctypes.c_void_p(host), ctypes.c_size_t(size_bytes), stream.handle)

    def copy_out(self, host: int, source: int, size_bytes: int, stream: Stream) -> None:
        self.call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host), ctypes.c_uint64(source), ctypes.c_size_t(size_bytes), stream.handle)

    def copy(self, to: int, source: int, size_bytes: int, stream: Stream) -> None:
        self.call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size_bytes), stream.handle)

    def fill(self, to: int, byte: int, size_bytes: int, stream: Stream) -> None:
        self.call("cuMemsetD8Async", ctypes.c_uint64(to), ctypes.c_ubyte(byte), ctypes.c_size_t(size_bytes), stream.handle)

    def load(self, code: bytes) -> Module:
        return Module(self, code)

    @contextmanager
    def capture(self, stream: Stream) -> Iterator[Graph]:
        """What `stream` is given inside becomes the graph instead of running."""
        result, graph = Graph(self), ctypes.c_void_p()
        self.call("cuStreamBeginCapture_v2", stream.handle, _CAPTURE_RELAXED)
        try:
            yield result
        finally:
            self.call("cuStreamEndCapture", stream.handle, ctypes.byref(graph))
        result.instantiate(graph)

    def synchronize(self) -> None:
        self.call("cuCtxSynchronize")

    def close(self) -> None:
        """Let go of the context; with the last user it goes, and all its memory."""
        self._driver.cuDevicePrimaryCtxRelease_v2(self._ordinal)


class Module:
    """Loaded machine code."""

    def __init__(self, device: Device, code: bytes) -> None:
        self._device, self._handle = device, ctypes.c_void_p()
        device.call("cuModuleLoadData", ctypes.byref(self._handle), code)

    def kernel(self, name: str, shared_bytes: int = 0) -> Kernel:
        return Kernel(self._device, self._handle, name, shared_bytes)
