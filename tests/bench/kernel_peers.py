"""The CPU kernel beside what other engines run on the same experts, in one set of interleaved rounds.

    python tests/bench/kernel_peers.py [--tokens 1,8,32] [--threads 1,2] [--rounds 12] [--ggml FOLDER] [--json]

Peers are taken where they are installed, and named where they are not:
ggml   its CPU library, from FOLDER or from an installed llama_cpp or pywhispercpp, with MXFP4 weights repacked for the
       CPU (`repack`) and as they are (`plain`). Activations are rounded to 8 bits per 32, which is not exact.
torch  the reference of this project: expand, then multiply
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evrun.kernels import bench_cpu, formats
from evrun.kernels.api import Row

MXFP4, F32, I32 = 39, 0, 26
"""ggml's numbers of the types."""


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Ggml:
    """The functions of ggml's CPU backend that a multiplication needs."""

    def __init__(self, folder: Path) -> None:
        self.base = self._load(folder, "libggml-base")
        self.cpu = self._load(folder, "libggml-cpu")
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self.init = self._function("ggml_init", pointer, InitParams)
        self.tensor = self._function("ggml_new_tensor_2d", pointer, pointer, number, ctypes.c_int64, ctypes.c_int64)
        self.tensor3 = self._function("ggml_new_tensor_3d", pointer, pointer, number, *[ctypes.c_int64] * 3)
        self.mul_mat_id = self._function("ggml_mul_mat_id", pointer, pointer, pointer, pointer, pointer)
        self.mul = self._function("ggml_mul", pointer, pointer, pointer, pointer)
        self.silu = self._function("ggml_silu", pointer, pointer, pointer)
        self.clamp = self._function("ggml_clamp", pointer, pointer, pointer, ctypes.c_float, ctypes.c_float)
        self.graph = self._function("ggml_new_graph", pointer, pointer)
        self.expand = self._function("ggml_build_forward_expand", None, pointer, pointer)
        self.allocate = self._function("ggml_backend_alloc_ctx_tensors_from_buft", pointer, pointer, pointer)
        self.set = self._function("ggml_backend_tensor_set", None, pointer, pointer, size, size)
        self.get = self._function("ggml_backend_tensor_get", None, pointer, pointer, size, size)
        self.compute = self._function("ggml_backend_graph_compute", number, pointer, pointer)
        self.cpu.ggml_backend_cpu_init.restype = pointer
        self.cpu.ggml_backend_cpu_set_n_threads.argtypes = (pointer, number)
        self.plain = self._function("ggml_backend_cpu_buffer_type", pointer)
        self.repack = self.cpu["_Z35ggml_backend_cpu_repack_buffer_typev"]
        self.repack.restype = pointer

    @staticmethod
    def _load(folder: Path, name: str) -> ctypes.CDLL:
        found = sorted(folder.glob(f"{name}*.so*"))
        if not found:
            raise OSError(f"no {name}*.so* in {folder}")
        return ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self.base, name)
        function.restype, function.argtypes = result, arguments
        return function

    def context(self, tensors: int) -> int:
        return int(self.init(InitParams(tensors * 1024 + (1 << 20), None, True)))


class GgmlPeer:
    """A layer call as ggml's own models make it: three multiplications with expert ids. Holds its own copy of the weights.

    Route weights and the sum over the experts of a token are left out, to the peer's favour.
    """

    def __init__(self, ggml: Ggml, kind: str, work: bench_cpu.Work, threads: int, rows: Sequence[Row]) -> None:
        self.name = f"ggml-{kind}"
        self._ggml, self._work = ggml, work
        self._position = {id(row): i for i, row in enumerate(rows)}
        self._kept = list(rows)
        context = ggml.context(3)
        h, i = work.hidden, work.intermediate
        self._weights = [ggml.tensor3(context, MXFP4, k, n, len(rows)) for n, k in ((i, h), (i, h), (h, i))]
        if not ggml.allocate(context, ggml.repack() if kind == "repack" else ggml.plain()):
            raise MemoryError(f"{self.name}: no memory for {len(rows)} experts")
        for tensor, codes, scales in zip(self._weights, ("w1", "w3", "w2"), ("s1", "s3", "s2"), strict=True):
            blocks = np.concatenate([mxfp4(getattr(row, codes), getattr(row, scales)) for row in rows])
            ggml.set(tensor, blocks.ctypes.data, 0, blocks.nbytes)
        self._backend = ggml.cpu.ggml_backend_cpu_init()
        ggml.cpu.ggml_backend_cpu_set_n_threads(self._backend, threads)
        self._graphs: dict[tuple[int, int], tuple[int, int, int, int]] = {}

    def call(
        self,
        x: npt.NDArray[Any],
        ids: npt.NDArray[np.int32],
        weights: npt.NDArray[np.float32],
        experts: Sequence[int],
        rows: Sequence[Row],
        out: npt.NDArray[Any],
        combine: str,
        beat: Any = None,
    ) -> int:
        """Every expert on every token, as the bench asks."""
        ggml = self._ggml
        graph, source, chosen, result = self._graph(len(x), len(rows))
        values = np.ascontiguousarray(formats.bfloat16_bits_to_float32(x) if x.dtype == np.uint16 else x, np.float32)
        names = np.tile(np.array([self._position[id(row)] for row in rows], np.int32), (len(x), 1))
        ggml.set(source, values.ctypes.data, 0, values.nbytes)
        ggml.set(chosen, names.ctypes.data, 0, names.nbytes)
        if ggml.compute(self._backend, graph):
            raise RuntimeError(f"{self.name}: the graph failed")
        self.last = np.empty((len(x), len(rows), self._work.hidden), np.float32)
        ggml.get(result, self.last.ctypes.data, 0, self.last.nbytes)
        return len(x) * len(rows)

    def _graph(self, tokens: int, experts: int) -> tuple[int, int, int, int]:
        key = tokens, experts
        if key not in self._graphs:
            ggml, limit = self._ggml, self._work.swiglu_limit
            context = ggml.context(4096)
            source = ggml.tensor3(context, F32, self._work.hidden, 1, tokens)
            chosen = ggml.tensor(context, I32, experts, tokens)
            w1, w3, w2 = self._weights
            gate = ggml.silu(context, ggml.clamp(context, ggml.mul_mat_id(context, w1, source, chosen), -3e38, limit))
            up = ggml.clamp(context, ggml.mul_mat_id(context, w3, source, chosen), -limit, limit)
            result = ggml.mul_mat_id(context, w2, ggml.mul(context, gate, up), chosen)
            graph = ggml.graph(context)
            ggml.expand(graph, result)
            if not ggml.allocate(context, ggml.plain()):
                raise MemoryError(f"{self.name}: no memory for a graph")
            self._graphs[key] = graph, source, chosen, result
        return self._graphs[key]


def mxfp4(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """ggml's blocks of 32: the scale, then 16 bytes of which the lower nibbles come first."""
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*scales.shape, 32)
    packed = nibbles[..., :16] | nibbles[..., 16:] << 4
    return np.ascontiguousarray(np.concatenate([scales[..., None], packed], axis=-1))


def find_ggml(folder: Path | None) -> Ggml | str:
    """The library, or why there is none."""
    places = [folder] if folder else []
    for package in ("llama_cpp", "pywhispercpp", "_pywhispercpp"):
        found = importlib.util.find_spec(package)
        if found is not None and found.origin:
            here = Path(found.origin).parent
            places += [here / "lib", here, *here.glob("*.libs"), *here.parent.glob("pywhispercpp*.libs")]
    reasons = []
    for place in places:
        try:
            return Ggml(place)
        except (OSError, AttributeError) as error:
            reasons.append(str(error))
    return "; ".join(reasons) or "neither llama_cpp nor pywhispercpp is installed"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=numbers, default=[1, 8, 32])
    parser.add_argument("--threads", type=numbers, default=[1])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--ggml", type=Path)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    peers: dict[str, bench_cpu.MakePeer] = {}
    ggml = find_ggml(asked.ggml)
    if isinstance(ggml, str):
        sys.stderr.write(f"ggml: not measured: {ggml}\n")
    else:
        for kind in ("repack", "plain"):
            peers[f"ggml-{kind}"] = lambda work, _tokens, threads, rows, kind=kind: GgmlPeer(ggml, kind, work, threads, rows)
    rows = bench_cpu.run(
        tokens=asked.tokens, threads=asked.threads, rounds=asked.rounds, baseline=not asked.no_torch, peers=peers,
        progress=lambda line: sys.stderr.write(line + "\n") and None,
    )  # fmt: skip
    if asked.json:
        sys.stdout.write(json.dumps({"bench": "kernel_peers", "rows": rows}, indent=1) + "\n")
        return
    for r in rows:
        sys.stdout.write(
            f"{r['backend']:16} {r['threads']} threads {r['tokens']:4} tokens  {r['seconds'] * 1e3:8.2f} ms an expert  "
            f"{r['gb_per_s']:6.2f} GB/s {r['gflop_per_s']:7.1f} GFLOP/s  {r['ratio']:7.2f} x read, {r['busy_ratio']:7.2f} by CPU time\n"
        )


if __name__ == "__main__":
    main()
