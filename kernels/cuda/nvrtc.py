"""NVRTC, NVIDIA's compiler as a library, through ctypes: CUDA C++ in, machine code of one architecture out.

It is looked for where its packages put it (`nvidia-cuda-nvrtc`, `nvidia-cuda-nvrtc-cu12`), then where the system's
loader finds it, then in a toolkit's folder. No card and no CUDA header is needed to compile.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from evrun.kernels.cuda.errors import CompileError, UnavailableError

_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
MINIMUM = (12, 0)
"""First version that knows compute capability 9.0."""


class Nvrtc:
    """A loaded compiler."""

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self.path = path
        self._library = library
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)

    def architectures(self) -> list[int]:
        """Compute capabilities it makes machine code for: 75, 80, ..."""
        count = ctypes.c_int()
        self._check("nvrtcGetNumSupportedArchs", self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        values = (ctypes.c_int * count.value)()
        self._check("nvrtcGetSupportedArchs", self._library.nvrtcGetSupportedArchs(values))
        return list(values)

    def compile(self, name: str, source: str, headers: dict[str, str], architecture: str, options: Sequence[str] = ()) -> tuple[bytes, str]:
        """Machine code for `sm_*`, PTX for `compute_*`, and the compiler's log. Raises CompileError."""
        library, program = self._library, ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
        names = (ctypes.c_char_p * len(headers))(*(header.encode() for header in headers))
        create = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names)
        self._check("nvrtcCreateProgram", create)
        try:
            arguments = [a.encode() for a in (f"--gpu-architecture={architecture}", "--std=c++17", *options)]
            result = library.nvrtcCompileProgram(program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments))
            log = self._text(program, "Log")
            if result:
                raise CompileError(name, architecture, log or self._error(result))
            return self._bytes(program, "PTX" if architecture.startswith("compute") else "CUBIN"), log
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size_name = f"nvrtcGet{what}Size" if what != "Log" else "nvrtcGetProgramLogSize"
        name = f"nvrtcGet{what}" if what != "Log" else "nvrtcGetProgramLog"
        size = ctypes.c_size_t()
        self._check(size_name, getattr(self._library, size_name)(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(name, getattr(self._library, name)(program, buffer))
        return buffer.raw

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        return self._bytes(program, what).rstrip(b"\0").decode(errors="replace").strip()

    def _error(self, result: int) -> str:
        text: bytes = self._library.nvrtcGetErrorString(result)
        return text.decode()

    def _check(self, call: str, result: int) -> None:
        if result:
            raise UnavailableError(f"{call} of {self.path}: {self._error(result)}")


@functools.cache
def load(newest_major: int | None = None) -> Nvrtc:
    """The first NVRTC found whose major version is at most `newest_major` (what the driver understands). Raises UnavailableError."""
    tried: list[str] = []
    for candidate in _candidates():
        try:
            compiler = Nvrtc(_open(candidate), candidate)
        except (OSError, UnavailableError) as error:
            tried.append(str(error).split(":")[0])
            continue
        if compiler.version < MINIMUM or (newest_major is not None and compiler.version[0] > newest_major):
            tried.append(f"{candidate} is version {compiler.version[0]}.{compiler.version[1]}")
            continue
        return compiler
    wanted = f"{MINIMUM[0]}.{MINIMUM[1]} or newer" + (f", at most {newest_major}.x for this driver" if newest_major else "")
    package = "nvidia-cuda-nvrtc-cu12" if newest_major == 12 else "nvidia-cuda-nvrtc"
    raise UnavailableError(f"NVRTC {wanted} not found ({'; '.join(tried) or 'no library'}); pip install {package}")


def _open(candidate: str) -> ctypes.CDLL:
    # The library opens its companion by bare name, which the loader finds only once it is in memory.
    for companion in sorted(Path(candidate).parent.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(companion))
    return ctypes.CDLL(candidate)


def _candidates() -> Iterator[str]:
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or []) if spec else []
    for soname in _SONAMES:
        for root in roots:
            yield from (str(path) for path in sorted(Path(root).glob(f"*/lib/{soname}")))
        yield soname
        for variable in ("CUDA_HOME", "CUDA_PATH"):
            if home := os.environ.get(variable):
                yield str(Path(home) / "lib64" / soname)
        yield f"/usr/local/cuda/lib64/{soname}"
