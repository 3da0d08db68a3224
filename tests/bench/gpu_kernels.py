"""Kernels of a card against the torch reference on full-size rows, and their times in all variants.

    python tests/bench/gpu_kernels.py truth FILE.npz   what the torch reference gives for full-size rows (needs no card)
    python tests/bench/gpu_kernels.py check FILE.npz   every kernel against that
    python tests/bench/gpu_kernels.py time OUT.json    as `evrun bench kernel --workers cuda:0 --json`, more variants
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from evrun.bench.card_kernel import DISTINCT, HIDDEN, TOP_K, Card, Case, Inputs, call, cases, random_rows, run, shape_of
from evrun.kernels import cuda, registry
from evrun.kernels.api import Combine
from evrun.kernels.cuda import nvrtc
from evrun.kernels.cuda.backend import CudaBackend
from evrun.kernels.cuda.driver import driver_version
from evrun.kernels.triton.compile import version as triton_version

VARIANTS = (("reference", "bfloat16"), ("reference", "float32"), ("weights-only", "bfloat16"), ("weights-only", "float32"))
CHECKED = ((1, 6), (1, 1), (2, 8), (33, 8), (160, 8))
"""(tokens, experts) of the calls that are compared, on a few of their tokens."""


def some_of(tokens: int) -> Any:
    return np.unique(np.linspace(0, tokens - 1, 3).astype(int))


class NoCard:
    """In the place of a card where only the host's side of `Inputs` is wanted."""

    def upload(self, array: Any) -> int:
        return 0


def rows_of(inputs: Inputs, some: Any) -> Any:
    """Which rows of an exact result, expert ascending and then token ascending, belong to the tokens in `some`."""
    tokens = [t for e in inputs.experts for t in np.nonzero((inputs.ids == e).any(1))[0]]
    return np.isin(tokens, some)


def truth() -> dict[str, Any]:
    """Reference results by case: sums, and the rows of the single experts."""
    from evrun.kernels import reference

    rows, results = random_rows(), {}
    host: Any = NoCard()
    for numerics, dtype in VARIANTS:
        shape = shape_of(numerics, dtype)
        backend = reference.create(shape, 160, TOP_K, 1)
        for tokens, experts in CHECKED:
            inputs, some = Inputs(host, tokens, dtype, experts), some_of(tokens)
            held = [rows[e % DISTINCT] for e in range(experts)]
            sums = np.empty((len(some), HIDDEN), np.float32)
            single = np.empty((int(np.isin(inputs.ids[some], inputs.experts).sum()), HIDDEN), shape.activation_dtype)
            for out, combine in ((sums, "partial"), (single, "exact")):
                backend.call(inputs.x[some], inputs.ids[some], inputs.weights[some], list(range(experts)), held, out, combine)  # type: ignore[arg-type]
            case = f"{numerics} {dtype} {tokens} {experts}"
            results |= {case: sums, f"{case} rows": single}
    return results


def check(device: cuda.CompilingDevice, wanted: dict[str, Any], cache: Path, kernels: Any) -> bool:
    """False if a difference is too large: of sums 2e-6 (weights-only float32) or 1e-3, of bf16 rows 1 ulp in 1 of 1,000 values."""
    card = Card(device, random_rows())
    fine = True
    for numerics, dtype in VARIANTS:
        shape = shape_of(numerics, dtype)
        backend = kernels.create_on(device, shape, 160, TOP_K, cache, 384)
        for tokens, experts in CHECKED:
            inputs, some = Inputs(card, tokens, dtype, experts), some_of(tokens)
            case = f"{numerics} {dtype} {tokens} {experts}"
            got = run_once(card, backend, inputs, np.empty((tokens, HIDDEN), np.float32), "partial")[some]
            pairs = int(np.isin(inputs.ids, inputs.experts).sum())
            single = run_once(card, backend, inputs, np.empty((pairs, HIDDEN), shape.activation_dtype), "exact")[rows_of(inputs, some)]
            error = float(np.linalg.norm(got - wanted[case]) / np.linalg.norm(wanted[case]))
            fine = fine and error < (2e-6 if (numerics, dtype) == ("weights-only", "float32") else 1e-3)
            line = f"{backend.name:10} {case:32}: relative error {error:.2e}"
            if dtype == "bfloat16":
                ulps = np.abs(ordered(single) - ordered(wanted[f"{case} rows"]))
                share = float(np.mean(ulps > 0))
                fine = fine and share < 1e-3
                line += f", rows differing {share:.3%}, beyond 1 ulp {np.mean(ulps > 1):.4%}, most {ulps.max()} ulp"
            say(line)
        backend.close()
    card.close()
    return fine


def run_once(card: Card, backend: CudaBackend, inputs: Inputs, got: Any, combine: Combine) -> Any:
    out = card.device.allocate(got.nbytes)
    card.device.fill(out.address, 0xFF, got.nbytes, card.stream)
    call(card, backend, inputs, card.table(range(len(inputs.experts))), len(inputs.experts), out.address, combine)
    card.device.copy_out(got.ctypes.data, out.address, got.nbytes, card.stream)
    card.stream.synchronize()
    backend.check()
    out.close()
    return got


def ordered(bits: Any) -> Any:
    """bf16 bits as integers in the order of their values, so that neighbours differ by 1."""
    signed = bits.astype(np.int32)
    return np.where(signed & 0x8000, 0x8000 - signed, signed)


def say(line: str) -> None:
    sys.stderr.write(line + "\n")


CASES = [
    *cases([1]),
    Case(1, 6, "reference", "float32"),
    Case(1, 6, "weights-only", "bfloat16"),
    *cases([4, 16, 64, 512, 4096]),
    Case(512, 128, "weights-only", "bfloat16"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["truth", "check", "time"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/evrun-cuda-cache"))
    parser.add_argument("--gpu-kernel", choices=registry.card_names(), default="cuda")
    arguments = parser.parse_args()
    if arguments.what == "truth":
        np.savez_compressed(arguments.file, **truth())
        return 0
    kernels = registry.card_module(arguments.gpu_kernel)
    device = kernels.CompilingDevice()
    if arguments.what == "check":
        fine = check(device, dict(np.load(arguments.file)), arguments.cache, kernels)
        say("all within tolerance" if fine else "DIFFERENT")
        return 0 if fine else 1
    compiler = triton_version() if arguments.gpu_kernel == "triton" else ".".join(map(str, nvrtc.load().version))
    versions = {"driver": ".".join(map(str, driver_version())), "compiler": compiler, "numpy": np.__version__}
    result = {"bench": "kernel", "machine": device.name, "versions": versions, "rows": run(device, CASES, arguments.cache, kernels)}
    arguments.file.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
