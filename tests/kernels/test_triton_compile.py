"""Machine code of the Triton kernels for every supported architecture, made without a card; its cache."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
from test_cuda_compile import CARDS, NUM_EXPERTS, full_size

from evrun.kernels.api import FfnShape
from evrun.kernels.cuda.driver import Limits
from evrun.kernels.cuda.errors import CompileError, UnavailableError
from evrun.kernels.triton import compile as compiling
from evrun.kernels.triton.compile import Code, compiled, run_compiler
from evrun.kernels.triton.plan import Plan, Unit, make_plan

TRITON = find_spec("triton")
needs_triton = pytest.mark.skipif(TRITON is None, reason="needs Triton")
ALL = [("reference", "bfloat16"), ("reference", "float32"), ("weights-only", "bfloat16"), ("weights-only", "float32")]
SMALL = Unit.make("find_bad_scale", {"HIDDEN": 64, "INTERMEDIATE": 32}, 4)
BROKEN = Unit.make("combine_rows", {"HIDDEN": 64, "TOP_K": 2, "DRAWS": 2, "BFLOAT16": 1, "CHANNELS": 100}, 4)
"""Blocks of 100 channels: Triton has powers of two only."""


def plan_for(shape: FfnShape, limits: Limits) -> Plan:
    return make_plan(shape, 6, NUM_EXPERTS, limits)


def number_of(limits: Limits) -> int:
    return limits.capability[0] * 10 + limits.capability[1]


def check(unit: Unit, code: Code, limits: Limits) -> None:
    """Fits the card, spills nothing, and multiplies matrices on the tensor cores where Triton can."""
    assert code.cubin.startswith(b"\x7fELF")
    assert code.shared_bytes <= limits.shared_bytes_per_block, unit
    assert stack_bytes(code) <= 16, unit
    if unit.kernel.startswith("moe_"):
        uses_tensor_cores = re.search(r"\bH?G?MMA\.", "".join(assembly(code))) is not None
        assert uses_tensor_cores == (unit.kernel.startswith("moe_multi") and limits.capability >= (8, 0)), unit


def stack_bytes(code: Code) -> int:
    found = re.findall(r"STACK:(\d+)", dumped(code, "--dump-resource-usage"))
    assert found
    return max(map(int, found))


def assembly(code: Code) -> str:
    return dumped(code, "--dump-sass")


def dumped(code: Code, what: str) -> str:
    assert TRITON is not None
    assert TRITON.origin is not None
    tool = Path(TRITON.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.cubin)
        file.flush()
        return subprocess.run([tool, what, file.name], capture_output=True, check=True, text=True).stdout


@needs_triton
@pytest.mark.slow
def test_machine_code_of_every_architecture() -> None:
    """The two largest kernels, all in one process of the compiler."""
    plans = [(plan_for(full_size(), limits), limits) for limits in CARDS.values()]
    jobs = [(unit, limits) for plan, limits in plans for unit in (plan.single_up, plan.tilings[0].up)]
    answers = run_compiler([(unit, number_of(limits)) for unit, limits in jobs])
    for (unit, limits), answer in zip(jobs, answers, strict=True):
        check(unit, compiling.read(answer), limits)


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("limits", CARDS.values(), ids=CARDS)
def test_machine_code_of_every_kernel(limits: Limits) -> None:
    units = list(dict.fromkeys(u for numerics, dtype in ALL for u in plan_for(full_size(numerics, dtype), limits).units(4096)))  # type: ignore[arg-type]
    answers = run_compiler([(unit, number_of(limits)) for unit in units])
    for unit, answer in zip(units, answers, strict=True):
        check(unit, compiling.read(answer), limits)


@needs_triton
def test_cache_compiles_once_and_its_key_covers_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled([SMALL], (7, 5), 13000, tmp_path)
    assert first[0].parameters == ("rows", "found")
    assert first[0].name == "find_bad_scale"
    asked: list[object] = []
    monkeypatch.setattr(compiling, "run_compiler", lambda jobs: asked.append(jobs) or [b'{}\n'] * len(jobs))
    monkeypatch.setattr(compiling, "read", bytes)
    compiled([SMALL], (7, 5), 13000, tmp_path)
    assert asked == []
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".cubin"]
    other = Unit.make("find_bad_scale", {"HIDDEN": 64, "INTERMEDIATE": 64}, 4)
    for units, capability, driver in [([SMALL], (8, 0), 13000), ([SMALL], (7, 5), 12080), ([SMALL, other], (7, 5), 13000)]:
        compiled(units, capability, driver, tmp_path)
    assert asked == [[(SMALL, 80)], [(SMALL, 75)], [(other, 75)]]
    monkeypatch.setattr(compiling, "version", lambda: "99.0")
    compiled([SMALL], (7, 5), 13000, tmp_path)
    assert len(asked) == 4


@needs_triton
def test_compile_error_names_the_kernel(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"combine_rows for sm_75: .*power of 2") as raised:
        compiled([BROKEN], (7, 5), 13000, tmp_path)
    assert "tl.arange(0, CHANNELS)" in raised.value.log
    assert list(tmp_path.glob("*.cubin")) == []


def test_without_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiling.metadata, "version", lambda name: "3.0.1")
    with pytest.raises(UnavailableError, match=r"Triton 3\.0\.1 is too old; 3\.3 or newer"):
        compiled([SMALL], (7, 5), 13000, tmp_path)

    def absent(name: str) -> str:
        raise compiling.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(compiling.metadata, "version", absent)
    with pytest.raises(UnavailableError, match="not installed; pip install triton"):
        compiled([SMALL], (7, 5), 13000, tmp_path)
