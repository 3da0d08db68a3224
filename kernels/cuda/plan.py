"""Decides, from the geometry and a card's limits, how the kernels are cut: pure arithmetic, no driver.

Constants that a kernel is compiled with depend on the geometry, the numerics and the card alone, never on a call.
"""

from __future__ import annotations

from dataclasses import dataclass

from evrun.kernels.api import FfnShape
from evrun.kernels.cuda.compile import Unit
from evrun.kernels.cuda.driver import Limits
from evrun.kernels.cuda.errors import UnavailableError
from evrun.kernels.cuda.wgmma import NARROW_WIDTHS

MINIMUM_CAPABILITY = (7, 5)
"""First with the fp16 tensor-core instruction that the kernels build on."""

GROUP_PITCH = 80
RESERVED_BYTES = 1024
"""Shared memory of a block that the system keeps."""
RING_LIMIT = 8
STAGE_LIMIT = 16
CUTS = ((16, 2), (16, 1), (8, 2), (8, 1), (4, 1))
"""(warps, steps) of the single-token kernel, the best first."""
FEW_EXPERTS = {1: (16,), 2: (20, 16)}
"""Experts of cuts of their own, and the warps of these, the best first: what a rank of four has of one token."""
MOST_WARPS = {1: 20, 3: 16}
"""By planes: more would not leave a thread enough registers."""
BULK_CAPABILITY = (9, 0)
"""First with an engine for bulk copies."""
BULK_WARPS = 20
BULK_STEPS = 2
TILE = 8
"""Rows that a team computes at a time, and that are copied together."""
CACHE_ALIGNMENT = 16


@dataclass(frozen=True)
class SingleTokenPlan:
    """`single_token.cu` or `single_token_bulk.cu`: one block a multiprocessor; `experts_at_once` in a launch."""

    source: str
    blocks: int
    threads: int
    warps: int
    """Those that compute."""
    steps: int
    """Steps of 2 x 128 columns in a task: its partial sum is one term of a row's sum."""
    ring: int
    """Tasks whose codes a warp has in shared memory or on their way; in bulk: stages of a block."""
    experts_at_once: int
    pairs: int
    rows: int
    shared_bytes: int


@dataclass(frozen=True)
class Tiling:
    """One pair of matrix kernels: which tiles it takes, and what it is compiled with."""

    threads: int
    shared_bytes: int
    least_tokens: int
    """Of a call in which it may find tiles of its own."""
    constants: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class MultiTokenPlan:
    """`multi_token.cu` (`wgmma` false) or `multi_token_wgmma.cu`, whose tilings share the tiles of a call."""

    wgmma: bool
    tilings: tuple[Tiling, ...]


def planes(shape: FfnShape) -> int:
    """fp16 numbers that hold one activation exactly: an E4M3 or a bf16 fits one, an fp32 takes three."""
    return 1 if shape.numerics == "reference" or shape.dtype == "bfloat16" else 3


def geometry_problem(shape: FfnShape) -> str | None:
    """Why no kernel can compute this geometry, or None."""
    for name, value in (("hidden", shape.hidden), ("intermediate", shape.intermediate)):
        if value < 32 or value % 32:
            return f"{name} size {value} is not a multiple of 32"
    return None


def check_card(shape: FfnShape, card: str, limits: Limits) -> None:
    """Raises UnavailableError: a geometry that no kernel computes, a card that no kernel runs on."""
    problem = geometry_problem(shape)
    if problem:
        raise UnavailableError(problem)
    if limits.capability < MINIMUM_CAPABILITY:
        found, wanted = (".".join(map(str, c)) for c in (limits.capability, MINIMUM_CAPABILITY))
        raise UnavailableError(f"{card} has compute capability {found}; the kernels need {wanted} or newer")


def plan_single_token(shape: FfnShape, top_k: int, limits: Limits) -> tuple[SingleTokenPlan, ...]:
    """Cuts for few and for up to `top_k` experts at once, the fewest first; none: one token goes the way of many.

    That happens on cards with few multiprocessors, of which each would own too long a run of rows. All cuts add up a
    row in the same steps, so that its bits are the same in each.
    """
    bulk = _bulk_suits(shape, limits) and [_single_token_bulk(shape, limits, count) for count in (*FEW_EXPERTS, top_k)]
    if bulk and all(plan.ring >= 2 for plan in bulk):
        return tuple(plan for plan in bulk if plan.experts_at_once < top_k or plan is bulk[-1])
    for experts in range(top_k, 0, -1):
        for warps, steps in CUTS:
            widest = _single_token(shape, limits, warps, steps, experts)
            if widest.ring >= 2:
                few = []
                for count, choices in FEW_EXPERTS.items():
                    cuts = [_single_token(shape, limits, w, steps, count) for w in choices if w <= MOST_WARPS[planes(shape)]]
                    few += [plan for plan in cuts if plan.ring >= 2 and count < experts][:1]
                return (*few, widest)
    return ()


def _bulk_suits(shape: FfnShape, limits: Limits) -> bool:
    """Does `single_token_bulk.cu` take this geometry on this card?"""
    whole = shape.hidden % 512 == 0 and shape.intermediate % 256 == 0 and shape.hidden >= limits.multiprocessors
    few = max(shape.hidden, shape.intermediate) <= BULK_WARPS * BULK_STEPS * 256  # splits
    return whole and few and planes(shape) == 1 and limits.capability >= BULK_CAPABILITY


def _single_token_bulk(shape: FfnShape, limits: Limits, experts: int) -> SingleTokenPlan:
    pairs, rows = _run(shape, limits, experts)
    up_groups, down_groups = shape.hidden // 32, shape.intermediate // 32
    up_splits, down_splits = (-(-groups // (8 * BULK_STEPS)) for groups in (up_groups, down_groups))
    up_tile, down_tile = (TILE * groups * 16 for groups in (up_groups, down_groups))
    stage = max(up_tile, max(1, up_tile // down_tile) * down_tile)
    x_groups = max(up_groups, experts * down_groups)
    up_rows, down_rows = (TILE * -(-count // TILE) for count in (2 * pairs, rows))
    scales = up_rows * up_groups + experts * _aligned(rows * down_groups + 15)
    sums = 4 * max(up_rows * up_splits, experts * down_rows * down_splits)
    fixed = scales + sums + x_groups * GROUP_PITCH + 4 * x_groups + 16 + 2 * CACHE_ALIGNMENT
    ring = min(STAGE_LIMIT, (limits.shared_bytes_per_block - fixed) // (stage + 16)) // 2 * 2
    threads = 32 * (BULK_WARPS + 1)  # a warp asks for the copies
    shared_bytes = fixed + ring * (stage + 16)
    source = "single_token_bulk.cu"
    return SingleTokenPlan(source, limits.multiprocessors, threads, BULK_WARPS, BULK_STEPS, ring, experts, pairs, rows, shared_bytes)


def _run(shape: FfnShape, limits: Limits, experts: int) -> tuple[int, int]:
    """Rows of w1 (and of w3) that a block has of all experts, and rows of w2 that it has of each, at most."""
    in_word = 2 if shape.dtype == "bfloat16" else 1  # activations that blocks send each other at once
    blocks = limits.multiprocessors
    return -(-experts * shape.intermediate // in_word // blocks) * in_word, -(-shape.hidden // blocks)


def _single_token(shape: FfnShape, limits: Limits, warps: int, steps: int, experts: int) -> SingleTokenPlan:
    pairs, rows = _run(shape, limits, experts)
    up_groups, down_groups = shape.hidden // 32, shape.intermediate // 32

    def steps_of(groups: int) -> int:
        return (-(-groups // 4) + 1) // 2

    def splits(groups: int) -> int:
        return -(-steps_of(groups) // steps)

    x_groups = max(8 * steps_of(up_groups), experts * 8 * steps_of(down_groups))
    fixed = (
        _aligned(pairs * 2 * up_groups)
        + _aligned(rows * experts * down_groups)
        + (x_groups + 1) * planes(shape) * GROUP_PITCH
        + 4 * x_groups
        + 4 * max(pairs * 2 * splits(up_groups), rows * experts * splits(down_groups))
        + 3 * CACHE_ALIGNMENT
    )
    slot = warps * steps * 2048
    ring = min(RING_LIMIT, (limits.shared_bytes_per_block - fixed) // slot)
    return SingleTokenPlan(
        "single_token.cu", limits.multiprocessors, 32 * warps, warps, steps, ring, experts, pairs, rows, fixed + ring * slot
    )


def plan_multi_token(shape: FfnShape, num_experts: int, limits: Limits) -> MultiTokenPlan:
    """Warpgroup instructions where the card has them and the geometry suits them, else `multi_token.cu`. Raises UnavailableError."""
    budget = limits.shared_bytes_per_block
    suits = planes(shape) == 1 and shape.hidden % 128 == 0 and shape.intermediate % 128 == 0
    if limits.capability == (9, 0) and suits:
        # Two blocks share a multiprocessor, which keeps RESERVED_BYTES for each.
        half = (budget + RESERVED_BYTES) // 2 - RESERVED_BYTES
        narrow = Tiling(256, half, 1, (("NARROW", 1), ("SHARED_BYTES", half)))
        wide = Tiling(256, budget, max(NARROW_WIDTHS) + 1, (("NARROW", 0), ("SHARED_BYTES", budget)))
        return MultiTokenPlan(True, (narrow, wide))
    for fragments, stages in ((8, 3), (8, 2), (4, 2)):
        stage = 4096 + fragments * 8 * (256 * planes(shape) + 16)
        shared = stages * stage + 4 * (num_experts + 1) + 4 * fragments * 8
        if shared <= budget:
            constants = (("STAGES", stages), ("MAX_NT", fragments), ("SHARED_BYTES", shared))
            return MultiTokenPlan(False, (Tiling(128, shared, 1, constants),))
    raise UnavailableError(f"{budget} bytes of shared memory do not hold two stages of {stage} bytes")


@dataclass(frozen=True)
class Units:
    """Everything that is compiled for one backend."""

    single_token: tuple[Unit, ...]
    """One a plan."""
    multi_token: tuple[Unit, ...]
    """One a tiling."""
    prepare: Unit
    group_tokens: Unit
    combine: Unit
    find_bad_scale: Unit

    def all(self) -> tuple[Unit, ...]:
        return (*self.single_token, *self.multi_token, self.prepare, self.group_tokens, self.combine, self.find_bad_scale)


def group_tokens_shared_bytes(num_experts: int) -> int:
    return 4 * ((num_experts + 31) // 32) + 2 * 8 * 4


def units(shape: FfnShape, num_experts: int, singles: tuple[SingleTokenPlan, ...], multi: MultiTokenPlan) -> Units:
    """The sources with their constants."""
    common: dict[str, int | float | str] = {
        "HIDDEN": shape.hidden,
        "INTERMEDIATE": shape.intermediate,
        "SWIGLU_LIMIT": float(shape.swiglu_limit),
        "REFERENCE": int(shape.numerics == "reference"),
        "BFLOAT16": int(shape.dtype == "bfloat16"),
    }
    source = "multi_token_wgmma.cu" if multi.wgmma else "multi_token.cu"
    many = common | {"MAX_EXPERTS": num_experts}
    ids = {"MAX_EXPERT_ID": num_experts - 1, "SHARED_BYTES": group_tokens_shared_bytes(num_experts)}
    return Units(
        single_token=tuple(Unit.make(single.source, common | _single_token_constants(single)) for single in singles),
        multi_token=tuple(Unit.make(source, many | dict(tiling.constants)) for tiling in multi.tilings),
        prepare=Unit.make("prepare.cu", common | {"WGMMA": int(multi.wgmma)}),
        group_tokens=Unit.make("group_tokens.cu", ids),
        combine=Unit.make("combine.cu", common),
        find_bad_scale=Unit.make("find_bad_scale.cu", {"HIDDEN": shape.hidden, "INTERMEDIATE": shape.intermediate}),
    )


def _single_token_constants(plan: SingleTokenPlan) -> dict[str, int]:
    return {
        "BLOCKS": plan.blocks,
        "WARPS": plan.warps,
        "STEPS": plan.steps,
        "RING": plan.ring,
        "MAX_EXPERTS": plan.experts_at_once,
        "MAX_PAIRS": plan.pairs,
        "MAX_ROWS": plan.rows,
        "SHARED_BYTES": plan.shared_bytes,
    }


def _aligned(size: int) -> int:
    return -(-size // CACHE_ALIGNMENT) * CACHE_ALIGNMENT
