"""Decides which kernels are compiled with which constants, and how large their grids are: pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evrun.kernels.api import FfnShape
from evrun.kernels.cuda.driver import Limits

TENSOR_CORES_FROM = (8, 0)
"""Before, Triton multiplies matrices with fp32 instructions; bfloat16 operands are of no use there."""
HOPPER = (9, 0)
"""Its matrix instruction takes four warps' registers at once; elsewhere eight warps share a wide tile's sums."""
SINGLE_UP_ROWS, SINGLE_DOWN_ROWS = 32, 16
COMBINED_CHANNELS = 1024
X_CHANNELS = 1024
"""Of one token, prepared by one program."""
SINGLE_PARTS, MULTI_PARTS = 8, 2
"""Codes in a word, codes in a byte."""


@dataclass(frozen=True)
class Unit:
    """One kernel with its constants."""

    kernel: str
    constants: tuple[tuple[str, int | float], ...]
    warps: int
    stages: int = 3

    @classmethod
    def make(cls, kernel: str, constants: Mapping[str, int | float], warps: int, stages: int = 3) -> Unit:
        return cls(kernel, tuple(sorted(constants.items())), warps, stages)


@dataclass(frozen=True)
class Tiling:
    """The matrix kernels for calls of up to `most_tokens` tokens (None: any number): `rows` channels by `width` pairs a tile."""

    rows: int
    width: int
    most_tokens: int | None
    up: Unit
    down: Unit


@dataclass(frozen=True)
class Plan:
    """Everything that is compiled for one backend."""

    single_prepare: Unit
    single_up: Unit
    single_down: Unit
    count_tokens: Unit
    place_tokens: Unit
    multi_prepare: Unit
    tilings: tuple[Tiling, ...]
    combine: Unit
    find_bad_scale: Unit

    def units(self, max_tokens: int) -> list[Unit]:
        """Those that calls of up to `max_tokens` need."""
        wanted = [self.single_prepare, self.single_up, self.single_down, self.find_bad_scale]
        if max_tokens > 1:
            wanted += [self.count_tokens, self.place_tokens, self.multi_prepare, self.combine]
            for tiling in self.tilings_for(max_tokens):
                wanted += [tiling.up, tiling.down]
        return wanted

    def tilings_for(self, max_tokens: int) -> tuple[Tiling, ...]:
        """Up to the first that takes `max_tokens`."""
        last = next(i for i, t in enumerate(self.tilings) if t.most_tokens is None or max_tokens <= t.most_tokens)
        return self.tilings[: last + 1]


def planes(shape: FfnShape) -> int:
    """bfloat16 numbers that hold one activation exactly: an E4M3 with its scale or a bf16 fits one, an fp32 takes three."""
    return 1 if shape.numerics == "reference" or shape.dtype == "bfloat16" else 3


def make_plan(shape: FfnShape, top_k: int, num_experts: int, limits: Limits) -> Plan:
    sizes = {"HIDDEN": shape.hidden, "INTERMEDIATE": shape.intermediate}
    value = {"BFLOAT16": int(shape.dtype == "bfloat16")}
    exactly = {"PLANES": planes(shape)}
    rounding = {"REFERENCE": int(shape.numerics == "reference")}
    draws = {"TOP_K": top_k, "DRAWS": _power_of_two(top_k)}
    experts = {"EXPERTS": _power_of_two(num_experts)}
    swiglu = {"LIMIT": float(shape.swiglu_limit)}
    single = sizes | value | exactly | draws
    multi = sizes | value | exactly | experts

    def prepare(parts: int) -> Unit:
        return Unit.make("prepare_x", {"HIDDEN": shape.hidden, "PARTS": parts} | value | exactly | rounding, 4)

    def tiling(rows: int, width: int, most_tokens: int | None) -> Tiling:
        shared = width > 16 and limits.capability != HOPPER
        chunk, warps = (64, 8) if shared else (128, 4) if tensor_cores else (32, 4)
        own = multi | {"TENSOR_CORES": int(tensor_cores), "CHUNK": chunk, "ROWS": rows, "TOKENS": width}
        up = Unit.make("moe_multi_token_up", own | rounding | swiglu | {"TOP_K": top_k}, warps)
        return Tiling(rows, width, most_tokens, up, Unit.make("moe_multi_token_down", own, warps))

    # A tile is as wide as an expert has tokens if all are drawn alike: T K / E. That T alone decides keeps the bits of a
    # row independent of what else a rank has. The sizes are the largest whose kernels spill no registers.
    tensor_cores = limits.capability >= TENSOR_CORES_FROM
    widest_narrow = max(1, 16 * num_experts // top_k)
    tilings: tuple[Tiling, ...] = (tiling(32, 16, None),)
    if tensor_cores:
        tilings = (tiling(64, 16, widest_narrow), tiling(64, 64 if planes(shape) == 1 else 32, None))
    return Plan(
        single_prepare=prepare(SINGLE_PARTS),
        single_up=Unit.make("moe_single_token_up", single | rounding | swiglu | {"ROWS": SINGLE_UP_ROWS}, 8),
        single_down=Unit.make("moe_single_token_down", single | {"ROWS": SINGLE_DOWN_ROWS}, 4),
        count_tokens=Unit.make("count_tokens", {"TOP_K": top_k}, 4),
        place_tokens=Unit.make("place_tokens", {"TOP_K": top_k} | experts, 4),
        multi_prepare=prepare(MULTI_PARTS),
        tilings=tilings,
        combine=Unit.make("combine_rows", {"HIDDEN": shape.hidden, "CHANNELS": COMBINED_CHANNELS} | value | draws, 4),
        find_bad_scale=Unit.make("find_bad_scale", sizes, 4),
    )


def token_tiles(tokens: int, top_k: int, num_experts: int, width: int) -> int:
    """At least as many tiles as `num_experts` experts can have of a call, whatever their tokens."""
    pairs = tokens * top_k
    return min(num_experts * -(-tokens // width), pairs // width + min(num_experts, pairs))


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
