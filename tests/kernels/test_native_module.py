"""The module around the native library: that it is there, what it refuses, what it costs to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import native_cases as cases
import numpy as np
import pytest

import evrun.kernels.native
from evrun.kernels import native, self_test
from evrun.kernels.api import FfnShape
from evrun.kernels.native import library

SHAPE = FfnShape(96, 160, 10.0, "reference", "bfloat16")


def test_the_library_is_built() -> None:
    assert native.probe() is None


def test_variants_end_with_a_supported_one_and_begin_with_plain_cpp() -> None:
    known = native.variants()
    assert known[0].name == "scalar"
    assert known[0].supported
    assert len({v.name for v in known}) == len(known)
    assert all(v.description for v in known)


def test_measure_names_a_supported_variant() -> None:
    assert native.measure() in cases.VARIANTS


@pytest.mark.parametrize("variant", cases.VARIANTS)
@pytest.mark.parametrize("numerics", ["reference", "weights-only"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_self_test_passes(variant: str, numerics: str, dtype: str) -> None:
    shape = self_test.shape_like(FfnShape(5120, 2304, 10.0, numerics, dtype))  # type: ignore[arg-type]
    assert self_test.run(native.create(shape, 3, 1, 1, variant=variant), shape) is None


def test_a_missing_library_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(evrun.kernels.native, "__path__", [str(tmp_path)])
    library.load.cache_clear()
    try:
        reason = native.probe()
        assert reason is not None
        assert "not found" in reason
        assert str(tmp_path) in reason
        (tmp_path / library.FILE_NAME).write_bytes(b"no library")
        broken = native.probe()
        assert broken is not None
        assert "cannot be loaded" in broken
        with pytest.raises(native.NativeLibraryError):
            native.create(SHAPE, 1, 1, 1)
    finally:
        library.load.cache_clear()


def test_import_and_call_without_torch() -> None:
    code = (
        "import sys, numpy as np\n"
        "from evrun.kernels import native, self_test\n"
        "from evrun.kernels.api import FfnShape\n"
        "s = self_test.shape_like(FfnShape(96, 160, 10.0, 'reference', 'bfloat16'))\n"
        "assert self_test.run(native.create(s, 3, 1, 2), s) is None\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"variant": "mmx"}, "'mmx': unknown; known: scalar"),
        ({"threads": 0}, "threads 0: expected at least 1"),
        ({"cpus": [0], "threads": 2}, "1 CPUs for 2 threads"),
        ({"shape": FfnShape(100, 160, 10.0, "reference", "bfloat16")}, "hidden 100"),
    ],
)
def test_create_refuses(arguments: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        native.create(**{"shape": SHAPE, "max_tokens": 4, "top_k": 3, "threads": 1, **arguments})  # type: ignore[arg-type]


def test_call_refuses_what_does_not_fit() -> None:
    case = cases.random_case(SHAPE, 3)
    backend = case.create()
    good = (case.x, case.ids, case.weights, case.experts, case.rows, case.out("partial"), "partial")

    def call(**changed: object) -> None:
        names = ("x", "ids", "weights", "experts", "rows", "out", "combine")
        backend.call(*(changed.get(n, v) for n, v in zip(names, good, strict=True)))  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=r"x: expected uint16 \[3, 96\], got float32 \[3, 96\]"):
        call(x=np.zeros((3, 96), np.float32))
    with pytest.raises(ValueError, match="not contiguous"):
        call(x=np.zeros((3, 192), np.uint16)[:, ::2])
    with pytest.raises(ValueError, match=r"weights: expected float32 \[3, 3\]"):
        call(weights=np.zeros((3, 2), np.float32))
    with pytest.raises(ValueError, match=r"w2: expected uint8 \[96, 80\]"):
        call(rows=[case.rows[0]._replace(w2=case.rows[0].w1), *case.rows[1:]])
    with pytest.raises(ValueError, match="5 experts, 4 rows"):
        call(rows=case.rows[1:])
    with pytest.raises(ValueError, match="rows in out"):
        call(out=np.zeros((case.pairs - 1, 96), np.uint16), combine="exact")
    with pytest.raises(ValueError, match="at most 3 tokens"):
        cases.random_case(SHAPE, 4).run(backend)
    twice = case.ids.copy()
    twice[1] = [0, 3, 0]
    with pytest.raises(ValueError, match="token 1 names expert 0 twice"):
        call(ids=twice)
    call()
    backend.close()
    with pytest.raises(ValueError, match="closed"):
        call()


def test_pinned_threads_compute_the_same() -> None:
    case = cases.random_case(FfnShape(512, 1024, 10.0, "reference", "bfloat16"), 2)
    pinned = native.create(case.shape, 2, 3, 2, cpus=[0, 0])
    np.testing.assert_array_equal(case.run(pinned), case.run(case.create()))


def test_beat_is_called_in_a_long_call_and_may_raise() -> None:
    """Calls of the plain variant until one took longer than the 20 ms between two beats."""
    shape = FfnShape(1024, 1024, 10.0, "weights-only", "float32")
    case = cases.random_case(shape, 64, experts=1, top_k=1, mine=[0])
    backend = case.create(variant="scalar")
    beats = []
    arguments = (case.x, case.ids, case.weights, case.experts, case.rows, case.out("partial"), "partial")
    assert backend.call(*arguments, beat=lambda: beats.append(1)) == 64
    assert beats

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backend.call(*arguments, beat=fail)
    assert backend.call(*arguments, beat=None) == 64


def test_read_takes_every_byte_once() -> None:
    backend = native.create(SHAPE, 1, 1, 2)
    data = np.random.default_rng(0).integers(0, 2**63, (3, 400_000), dtype=np.uint64)  # 3.2 MB a range: whole vectors
    expected = int(np.add.reduce(data, axis=None, dtype=np.uint64))
    assert backend.read([part.view(np.uint8) for part in data]) == expected
