"""libevrun_native.so: where it lies, what it offers, its C types (csrc/expert_ffn.h)."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import evrun.kernels.native

FILE_NAME = "libevrun_native.so"
ABI = 5
BAD_SCALE, TOO_LARGE, DUPLICATE = -1, -2, -3

BEAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Config(ctypes.Structure):
    _fields_ = (
        ("hidden", ctypes.c_int32),
        ("intermediate", ctypes.c_int32),
        ("swiglu_limit", ctypes.c_float),
        ("quantise", ctypes.c_int32),
        ("bfloat16", ctypes.c_int32),
        ("max_tokens", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("cpus", ctypes.c_void_p),
    )


class Call(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("tokens", ctypes.c_int32),
        ("slots", ctypes.c_int32),
        ("experts", ctypes.c_char_p),
        ("rows", ctypes.c_char_p),
        ("num_experts", ctypes.c_int32),
        ("exact", ctypes.c_int32),
        ("out", ctypes.c_void_p),
        ("out_rows", ctypes.c_int64),
        ("beat", ctypes.c_void_p),
        ("record", ctypes.c_void_p),
    )


class Fault(ctypes.Structure):
    _fields_ = (("expert", ctypes.c_int32), ("tensor", ctypes.c_int32), ("row", ctypes.c_int32))


class NativeLibraryError(RuntimeError):
    """The library is missing, cannot be loaded, or cannot do what was asked of it; the message says which."""


class Variant(NamedTuple):
    """One instruction set of the library. Later ones are preferred where nothing was measured."""

    name: str
    description: str
    supported: bool
    """By this CPU and its operating system."""


@functools.cache
def load() -> ctypes.CDLL:
    """The library with its functions declared. Raises NativeLibraryError with the reason."""
    # An editable install keeps the library in site-packages and the sources elsewhere: both are on the package's path.
    folders = [Path(folder) for folder in evrun.kernels.native.__path__]
    path = next((f / FILE_NAME for f in folders if (f / FILE_NAME).is_file()), None)
    if path is None:
        looked = ", ".join(str(f) for f in folders)
        raise NativeLibraryError(f"{FILE_NAME} not found in {looked}: it was not built; install again with a C++17 compiler on the PATH")
    try:
        library = ctypes.CDLL(str(path))
        library.evrun_abi.restype = ctypes.c_int32
        abi = library.evrun_abi()
    except (OSError, AttributeError) as error:
        raise NativeLibraryError(f"{path} cannot be loaded: {error}") from error
    if abi != ABI:
        raise NativeLibraryError(f"{path} is of another version: interface {abi}, expected {ABI}; install again")
    library.evrun_variants.restype = ctypes.c_int32
    for name, result in (("name", ctypes.c_char_p), ("description", ctypes.c_char_p), ("supported", ctypes.c_int32)):
        function = getattr(library, f"evrun_variant_{name}")
        function.argtypes, function.restype = (ctypes.c_int32,), result
    library.evrun_create.argtypes, library.evrun_create.restype = (ctypes.c_int32, ctypes.POINTER(Config)), ctypes.c_void_p
    library.evrun_destroy.argtypes, library.evrun_destroy.restype = (ctypes.c_void_p,), None
    library.evrun_run.argtypes = (ctypes.c_void_p, ctypes.POINTER(Call), ctypes.POINTER(Fault))
    library.evrun_run.restype = ctypes.c_int64
    library.evrun_read.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
    library.evrun_read.restype = ctypes.c_uint64
    rows = (ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    library.evrun_dequantise_fp8.argtypes, library.evrun_dequantise_fp8.restype = rows, None
    library.evrun_multiply_add.argtypes, library.evrun_multiply_add.restype = (ctypes.c_void_p, ctypes.c_uint64), ctypes.c_uint64
    return library


def variants() -> list[Variant]:
    """Every instruction set in the library, supported here or not. Raises NativeLibraryError."""
    library = load()
    return [
        Variant(
            library.evrun_variant_name(i).decode(), library.evrun_variant_description(i).decode(), bool(library.evrun_variant_supported(i))
        )
        for i in range(library.evrun_variants())
    ]


def probe() -> str | None:
    """None, or the reason why the library cannot be used here."""
    try:
        load()
    except NativeLibraryError as error:
        return str(error)
    return None
