"""The bench of the CPU kernels on experts of a toy size: that it runs and what its rows hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

from evrun.bench.__main__ import bench
from evrun.kernels import bench_cpu, native
from evrun.kernels.api import Row

FIELDS = {
    "backend", "tokens", "threads", "world", "memory", "numerics", "dtype", "seconds", "bytes", "gb_per_s", "gflop_per_s",
    "peak_gflop_per_s", "floor_seconds", "ratio", "busy_ratio", "rounds",
}  # fmt: skip


class Sleeper:
    """A peer that takes its time."""

    name = "sleeper"

    def call(
        self, x: npt.NDArray[Any], ids: Any, weights: Any, experts: Any, rows: list[Row], out: Any, combine: str, beat: Any = None
    ) -> int:
        out[:] = 0
        return len(x) * len(rows)


def test_rows_of_a_small_run() -> None:
    work = bench_cpu.Work(hidden=256, intermediate=128, dtype="float32", numerics="weights-only")
    lines: list[str] = []
    rows = bench_cpu.run(
        work,
        tokens=(1, 3),
        threads=(1, 2),
        rounds=2,
        memory=("anonymous", "mapped"),
        least_bytes=1_000_000,
        variants=[v.name for v in native.variants() if v.supported],
        peers={"sleeper": lambda work, tokens, threads, rows: Sleeper()},
        progress=lines.append,
    )
    names = {f"native-{v.name}" for v in native.variants() if v.supported} | {"sleeper"}
    for memory in ("anonymous", "mapped"):
        for threads in (1, 2):
            part = [r for r in rows if r["memory"] == memory and r["threads"] == threads]
            expected = names | ({"torch-reference"} if threads == 1 else set())
            assert {(r["backend"], r["tokens"]) for r in part} == {(name, t) for name in expected for t in (1, 3)}
    assert len(lines) == 4
    for row in rows:
        assert set(row) == FIELDS
        assert row["bytes"] == 3 * 256 * 128 * 17 // 32
        assert row["seconds"] > 0
        assert row["floor_seconds"] > 0
        assert row["peak_gflop_per_s"] > 0
        assert np.isclose(row["gb_per_s"] * row["seconds"] * 1e9, row["bytes"])


def test_the_largest_cache_is_no_smaller_than_that_of_a_core() -> None:
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    assert bench_cpu.largest_cache_bytes() >= (32 << 10 if sizes else 0)


def test_experts_are_handed_out_in_turn() -> None:
    work = bench_cpu.Work(hidden=64, intermediate=32)
    packed = bench_cpu._Packed(work, 10 * work.row_bytes, "anonymous")
    assert len(packed.rows) == 12  # whole calls
    first = packed.take(6)
    second = packed.take(6)
    assert not {id(r) for r in first} & {id(r) for r in second}
    assert packed.take(1)[0] is first[0]
    scales = np.concatenate([getattr(r, s).ravel() for r in packed.rows for s in ("s1", "s3", "s2")])
    assert scales.min() >= bench_cpu.SCALES[0]
    assert scales.max() <= bench_cpu.SCALES[1]


@pytest.mark.parametrize("names", ["fast", "native-mmx", "auto,native-scalar", ""])
def test_a_kernel_that_cannot_be_timed_is_refused(names: str) -> None:
    done = CliRunner().invoke(bench, ["kernel", "--cpu-kernel", names])
    assert done.exit_code == 2
    assert "expected auto or some of native-scalar" in done.output
