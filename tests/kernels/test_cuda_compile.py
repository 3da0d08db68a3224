"""Machine code of every kernel for every supported architecture, made without a card."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evrun.kernels.api import Dtype, FfnShape, Numerics
from evrun.kernels.cuda import compile as compiling
from evrun.kernels.cuda import nvrtc, plan
from evrun.kernels.cuda.compile import Unit, architecture_for, compiled, resources
from evrun.kernels.cuda.driver import Limits
from evrun.kernels.cuda.errors import CompileError, UnavailableError
from evrun.kernels.cuda.nvrtc import Nvrtc

CARDS = {
    "sm_75": Limits((7, 5), 68, 65536),
    "sm_80": Limits((8, 0), 108, 166912),
    "sm_86": Limits((8, 6), 28, 101376),
    "sm_89": Limits((8, 9), 128, 101376),
    "sm_90a": Limits((9, 0), 132, 232448),
    "sm_120": Limits((12, 0), 170, 101376),
}
NUM_EXPERTS = 384


def compiler_or_reason() -> Nvrtc | str:
    try:
        return nvrtc.load()
    except UnavailableError as error:
        return str(error)


COMPILER = compiler_or_reason()
needs_compiler = pytest.mark.skipif(isinstance(COMPILER, str), reason=str(COMPILER))


@pytest.fixture
def compiler() -> Nvrtc:
    assert isinstance(COMPILER, Nvrtc)
    return COMPILER


def full_size(numerics: Numerics = "reference", dtype: Dtype = "bfloat16") -> FfnShape:
    return FfnShape(5120, 2304, 10.0, numerics, dtype)


def units_for(shape: FfnShape, limits: Limits) -> plan.Units:
    return plan.units(shape, NUM_EXPERTS, plan.plan_single_token(shape, 6, limits), plan.plan_multi_token(shape, NUM_EXPERTS, limits))


@needs_compiler
@pytest.mark.parametrize("architecture", [pytest.param(name, marks=[pytest.mark.slow] * (name != "sm_75")) for name in CARDS])
@pytest.mark.parametrize(
    ("numerics", "dtype"), [("reference", "bfloat16"), pytest.param("weights-only", "float32", marks=pytest.mark.slow)]
)
def test_machine_code(compiler: Nvrtc, architecture: str, numerics: Numerics, dtype: Dtype) -> None:
    """No kernel spills registers, and no warpgroup instruction is made to wait for the one before."""
    limits = CARDS[architecture]
    assert architecture_for(limits.capability, compiler) == architecture
    kernels = {}
    for unit in units_for(full_size(numerics, dtype), limits).all():
        code, log = compiler.compile(unit.source, unit.text(), compiling.headers(), architecture, [*unit.options(), "--ptxas-options=-v"])
        assert code.startswith(b"\x7fELF")
        assert not re.findall(r"\(C75\d\d\).*serialized.*", log)
        kernels |= resources(log)
    assert ("moe_single_token_fp4" in kernels) == bool(plan.plan_single_token(full_size(numerics, dtype), 6, limits))
    assert {"moe_multi_token_up", "moe_multi_token_down", "prepare_x", "group_tokens", "combine_rows"} <= set(kernels)
    assert {name: used.spilled_bytes for name, used in kernels.items() if used.spilled_bytes} == {}


@needs_compiler
def test_cache_compiles_once(compiler: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Unit.make("find_bad_scale.cu", {"HIDDEN": 64, "INTERMEDIATE": 32})
    code = compiled(unit, "sm_75", compiler, 13000, tmp_path)
    monkeypatch.setattr(Nvrtc, "compile", lambda *_: pytest.fail("compiled again"))
    assert compiled(unit, "sm_75", compiler, 13000, tmp_path) == code
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".cubin"]


@needs_compiler
def test_cache_key_covers_everything(compiler: Nvrtc, tmp_path: Path) -> None:
    unit = Unit.make("find_bad_scale.cu", {"HIDDEN": 64, "INTERMEDIATE": 32})
    compiled(unit, "sm_75", compiler, 13000, tmp_path)
    compiled(unit, "sm_80", compiler, 13000, tmp_path)
    compiled(unit, "sm_75", compiler, 12080, tmp_path)
    compiled(Unit.make("find_bad_scale.cu", {"HIDDEN": 64, "INTERMEDIATE": 64}), "sm_75", compiler, 13000, tmp_path)
    assert len(list(tmp_path.glob("*.cubin"))) == 4


@needs_compiler
def test_compile_error_names_the_line(compiler: Nvrtc) -> None:
    with pytest.raises(CompileError, match=r"broken\.cu for sm_80: broken\.cu\(1\): error") as raised:
        compiler.compile("broken.cu", "int f() { return x; }", {}, "sm_80")
    assert "x" in raised.value.log


@needs_compiler
def test_a_card_newer_than_the_compiler_gets_ptx(compiler: Nvrtc) -> None:
    assert architecture_for((99, 0), compiler) == f"compute_{max(compiler.architectures())}"
    code, _ = compiler.compile("k.cu", 'extern "C" __global__ void k() {}', {}, "compute_75")
    assert b".target sm_75" in code


@pytest.mark.parametrize("limits", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize(("numerics", "dtype"), [("reference", "bfloat16"), ("weights-only", "float32")])
def test_plans_fit(limits: Limits, numerics: Numerics, dtype: Dtype) -> None:
    shape = full_size(numerics, dtype)
    singles, multi = plan.plan_single_token(shape, 6, limits), plan.plan_multi_token(shape, NUM_EXPERTS, limits)
    assert all(tiling.shared_bytes <= limits.shared_bytes_per_block for tiling in multi.tilings)
    assert singles or numerics == "weights-only"
    assert len({single.steps for single in singles}) <= 1
    assert [single.experts_at_once for single in singles] == sorted({single.experts_at_once for single in singles})
    for single in singles:
        assert single.shared_bytes <= limits.shared_bytes_per_block
        assert single.ring >= 2
        assert 1 <= single.experts_at_once <= 6
        assert single.pairs * single.blocks >= single.experts_at_once * shape.intermediate
        assert single.rows * single.blocks >= shape.hidden


def test_hopper_holds_all_experts_at_once() -> None:
    assert [single.experts_at_once for single in plan.plan_single_token(full_size(), 6, CARDS["sm_90a"])] == [1, 2, 6]
    assert plan.plan_multi_token(full_size(), NUM_EXPERTS, CARDS["sm_90a"]).wgmma


@pytest.mark.parametrize(
    ("card", "shape", "source"),
    [
        ("sm_90a", full_size(), "single_token_bulk.cu"),
        ("sm_90a", FfnShape(512, 256, 10.0, "reference", "float32"), "single_token_bulk.cu"),
        ("sm_90a", FfnShape(5120, 2272, 10.0, "reference", "bfloat16"), "single_token.cu"),  # no whole steps
        ("sm_90a", FfnShape(512, 256, 10.0, "weights-only", "float32"), "single_token.cu"),  # several planes
        ("sm_89", full_size(), "single_token.cu"),  # no engine
        ("sm_120", full_size(), "single_token.cu"),  # no room for two stages
    ],
)
def test_who_has_rows_brought_in_bulk(card: str, shape: FfnShape, source: str) -> None:
    singles = plan.plan_single_token(shape, 6, CARDS[card])
    assert {single.source for single in singles} == {source}
    assert all(single.ring % 2 == 0 for single in singles if source == "single_token_bulk.cu")


@pytest.mark.parametrize(("hidden", "intermediate"), [(100, 64), (64, 16), (0, 64)])
def test_geometry_that_no_kernel_computes(hidden: int, intermediate: int) -> None:
    assert "not a multiple of 32" in str(plan.geometry_problem(FfnShape(hidden, intermediate, 1.0, "reference", "float32")))
    assert plan.geometry_problem(full_size()) is None


def test_too_little_shared_memory() -> None:
    assert plan.plan_single_token(full_size(), 6, Limits((7, 5), 1, 49152)) == ()
    with pytest.raises(UnavailableError, match="shared memory"):
        plan.plan_multi_token(full_size(), NUM_EXPERTS, Limits((7, 5), 1, 16384))
