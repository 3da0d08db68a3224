"""The contract of the routed-expert kernels: what a backend gets and what it must give back.

Backends are siblings (`reference`, `native`; on cards `cuda`, `triton`), chosen by name in `registry`, and compute the
same function; `reference` is the truth they are compared to. Arrays are numpy or raw device addresses, so that a worker
on the native CPU backend imports no torch.

The function, for one expert with rows w1, w3 [I, H], w2 [H, I] and a token x [H] with route weight r (spec 3.2, 3.9):

    g = lin(x, w1);  u = lin(x, w3);  a = r * silu(min(g, limit)) * clamp(u, -limit, limit);  y = lin(a, w2)

numerics `reference`: `lin` rounds its input to E4M3 per 32 channels with a power-of-two scale first; `weights-only`
leaves that out. dtype `bfloat16`: g, u, a and y are rounded to bf16 (a before its E4M3 rounding); SwiGLU itself is
fp32. dtype `float32`: no rounding. Sums of products are fp32, in one order of K per backend and kernel. Which kernel
that is may follow from the call (its T, the tokens of that expert: the same on every rank of every world); so the bits
of a row (token, expert) depend on the call alone, never on which other experts a rank holds, on threads or on timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Numerics = Literal["reference", "weights-only"]
Dtype = Literal["bfloat16", "float32"]
Combine = Literal["partial", "exact"]
U8 = npt.NDArray[np.uint8]


class Row(NamedTuple):
    """One expert of one layer, packed as the release stores it: views into a mapping (or device addresses)."""

    w1: U8
    """[I, H/2] two E2M1 codes per byte, low nibble first"""
    s1: U8
    """[I, H/32] E8M0"""
    w3: U8
    s3: U8
    w2: U8
    """[H, I/2]"""
    s2: U8
    """[H, I/32]"""


@dataclass(frozen=True)
class FfnShape:
    """Everything about the function that does not change from call to call."""

    hidden: int
    intermediate: int
    swiglu_limit: float
    numerics: Numerics
    dtype: Dtype

    @property
    def activation_dtype(self) -> npt.DTypeLike:
        """numpy dtype of x and of exact rows: raw bf16 bits travel as uint16."""
        return np.uint16 if self.dtype == "bfloat16" else np.float32


class BadScaleError(ValueError):
    """E8M0 byte 255 in a row. `tensor` is w1, w3 or w2, `row` its output row, `expert` the position in the call."""

    def __init__(self, expert: int, tensor: str, row: int) -> None:
        self.expert, self.tensor, self.row = expert, tensor, row
        super().__init__(f"E8M0 byte 255 in {tensor}, row {row}")


class OneToken(Protocol):
    """Calls of one token without Python, for a worker that serves them so. `function` and `lane` are addresses: int64
    function(void *lane, const OneToken *call), the structure of native/csrc/one_token.h. It gives the rows computed, or -1 for
    a call with a row that it has not learned and for one that fails: both are for `CpuBackend.call`. Belongs to the thread that
    calls the backend, and ends with it."""

    function: int
    lane: int

    def learn(self, layer: int, expert: int, row: Row) -> None:
        """Where this row lies; it stays there."""
        ...


class CpuBackend(Protocol):
    """A CPU backend, made once per worker by the registry: `module.create(shape, max_tokens, top_k, threads)`.

    Everything it needs is allocated at construction, nothing per call beyond bounded scratch (no tensor above 4 MB).
    """

    name: str
    """For people, with the variant: `native-avx2`, `torch-reference`."""

    def call(
        self,
        x: npt.NDArray[Any],
        ids: npt.NDArray[np.int32],
        weights: npt.NDArray[np.float32],
        experts: Sequence[int],
        rows: Sequence[Row],
        out: npt.NDArray[Any],
        combine: Combine,
        beat: Any = None,
    ) -> int:
        """One layer call.

        x        [T, H] activation dtype
        ids      [T, K] int32: every expert of the call; those not in `experts` belong to other ranks
        weights  [T, K] fp32: route weights, already normalised and scaled
        experts  this rank's expert ids, ascending; rows: their packed rows, in the same order
        out      combine `partial`: [T, H] fp32, overwritten: sum of this rank's rows in ascending expert id, each first
                 rounded to dtype; zero where a token has no expert here.
                 combine `exact`: [>= n, H] activation dtype: one row per (expert ascending, token ascending)
        beat     called without arguments now and then during long calls, to show progress
        Returns n, the number of (token, expert) pairs computed. Raises BadScaleError.
        """
        ...

    def one_token(self, layers: int, experts: int, row_bytes: int, exact: bool, read: int) -> OneToken | None:
        """The short way for one token, or None where this backend has none.

        layers, experts  of the checkpoint; exact: combine
        read             address of an int64 to which the bytes of rows that a call reads are added
        """
        ...


def tokens_of(
    ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32], expert: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Tokens of a call that chose `expert`, ascending, and their route weights. A token draws an expert at most once."""
    token, draw = np.nonzero(ids == expert)
    return token, weights[token, draw]
