"""Which roundings a training forward makes, and those of activations with straight-through gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from evrun.demo.quantise import as_bfloat16, as_fp4, as_fp8_rows, as_fp8_tiles, straight
from evrun.kernels.formats_torch import round_fp8


@dataclass(frozen=True)
class Arithmetic:
    """`dtype` is what values are rounded to between operations."""

    dtype: torch.dtype = torch.bfloat16
    rounds_inputs: bool = True
    """Whether inputs of quantised linears are rounded to E4M3 (`--numerics reference`)."""
    packs_experts: bool = True
    """Whether routed experts have the values of their packed form."""
    packs_dense: bool = True
    """Whether all other weights have the values that the checkpoint stores."""

    def input(self, x: Tensor) -> Tensor:
        """x dtype -> the values that a quantised linear multiplies, in dtype (which holds them exactly)."""
        return quantised(round_fp8, x) if self.rounds_inputs else x

    def expert(self, w: Tensor) -> Tensor:
        return (as_fp4(w) if self.packs_experts else w).to(self.dtype)

    def dense(self, w: Tensor) -> Tensor:
        return (as_fp8_tiles(w) if self.packs_dense else w).to(self.dtype)

    def plain(self, w: Tensor) -> Tensor:
        """A tensor that is stored in BF16: its fp32 values."""
        return as_bfloat16(w) if self.packs_dense else w

    def rows(self, w: Tensor) -> Tensor:
        return (as_fp8_rows(w) if self.packs_dense else w).to(self.dtype)


def quantised(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A rounding of `kernels.formats_torch` with the gradient of its input; [..., K] of any float dtype -> same."""
    return straight(x, function(x.detach().float()).to(x.dtype))
