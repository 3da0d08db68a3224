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
from evrun.kernels import cuda
from evrun.kernels.cuda import nvrtc
from evrun.kernels.cuda.driver import driver_version

VARIANTS = (("reference", "bfloat16"), ("reference", "float32"), ("weights-only", "bfloat16"), ("weights-only", "float32"))
CHECKED = ((1, 6), (1, 1), (2, 8), (33, 8), (160, 8))
"""(tokens, experts) of the calls that are compared, on a few of their tokens."""


def some_of(tokens: int) -> Any:
    return np.unique(np.linspace(0, tokens - 1, 3).astype(int))


class NoCard:
    """In the place of a card where only the host's side of `Inputs` is wanted."""

    def upload(self, array: Any) -> int:
        return 0


def truth() -> dict[str, Any]:
    """Reference results by case."""
    from evrun.kernels import reference

    rows, results = random_rows(), {}
    host: Any = NoCard()
    for numerics, dtype in VARIANTS:
        backend = reference.create(shape_of(numerics, dtype), 160, TOP_K, 1)
        for tokens, experts in CHECKED:
            inputs, some = Inputs(host, tokens, dtype, experts), some_of(tokens)
            wanted = np.empty((len(some), HIDDEN), np.float32)
            held = [rows[e % DISTINCT] for e in range(experts)]
            backend.call(inputs.x[some], inputs.ids[some], inputs.weights[some], list(range(experts)), held, wanted, "partial")
            results[f"{numerics} {dtype} {tokens} {experts}"] = wanted
    return results


def check(device: cuda.CompilingDevice, wanted: dict[str, Any], cache: Path) -> bool:
    """False if a difference is too large."""
    card = Card(device, random_rows())
    stream = card.stream
    fine = True
    for numerics, dtype in VARIANTS:
        backend = cuda.create_on(device, shape_of(numerics, dtype), 160, TOP_K, cache, 384)
        for tokens, experts in CHECKED:
            inputs, some = Inputs(card, tokens, dtype, experts), some_of(tokens)
            out, got = device.allocate(tokens * HIDDEN * 4), np.empty((tokens, HIDDEN), np.float32)
            device.fill(out.address, 0xFF, got.nbytes, stream)
            call(card, backend, inputs, card.table(range(experts)), experts, out.address)
            device.copy_out(got.ctypes.data, out.address, got.nbytes, stream)
            stream.synchronize()
            backend.check()
            expected = wanted[f"{numerics} {dtype} {tokens} {experts}"]
            error = float(np.linalg.norm(got[some] - expected) / np.linalg.norm(expected))
            allowed = 2e-6 if (numerics, dtype) == ("weights-only", "float32") else 1e-3
            fine = fine and error < allowed and bool(np.isfinite(got).all())
            say(
                f"{backend.name:10} {numerics:12} {dtype:8} T={tokens:<4} experts={experts}: relative error {error:.2e}, "
                f"differing {np.mean(got[some] != expected):.2%}"
            )
        backend.close()
    return fine


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
    arguments = parser.parse_args()
    if arguments.what == "truth":
        np.savez_compressed(arguments.file, **truth())
        return 0
    device = cuda.CompilingDevice()
    if arguments.what == "check":
        fine = check(device, dict(np.load(arguments.file)), arguments.cache)
        say("all within tolerance" if fine else "DIFFERENT")
        return 0 if fine else 1
    versions = {"driver": ".".join(map(str, driver_version())), "nvrtc": ".".join(map(str, nvrtc.load().version)), "numpy": np.__version__}
    result = {"bench": "kernel", "machine": device.name, "versions": versions, "rows": run(device, CASES, arguments.cache)}
    arguments.file.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
