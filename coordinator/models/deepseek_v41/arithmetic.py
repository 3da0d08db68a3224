"""Which roundings the tree makes (spec 3.11): the one place where `--dtype` and `--numerics` become arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evrun.expert_worker.wire.errors import UsageError
from evrun.kernels.formats_torch import round_fp8

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NUMERICS = ("reference", "weights-only")


@dataclass(frozen=True)
class Arithmetic:
    """Operations compute in fp32; between them values are rounded to `dtype`."""

    dtype: torch.dtype
    rounds_inputs: bool
    """Whether quantised linears round their input to E4M3 first (spec 3.2)."""

    @classmethod
    def named(cls, dtype: str, numerics: str) -> Arithmetic:
        """Raises UsageError with the known names."""
        if dtype not in DTYPES:
            raise UsageError(f"dtype: expected one of {', '.join(DTYPES)}, found {dtype!r}")
        if numerics not in NUMERICS:
            raise UsageError(f"numerics: expected one of {', '.join(NUMERICS)}, found {numerics!r}")
        return cls(DTYPES[dtype], numerics == "reference")

    @property
    def is_exact(self) -> bool:
        """No rounding between operations."""
        return self.dtype == torch.float32

    def round(self, x: Tensor) -> Tensor:
        """fp32 -> dtype, nearest even."""
        return x.to(self.dtype)

    def rounded(self, x: Tensor) -> Tensor:
        """fp32 -> the fp32 values that `round` would keep."""
        return x if self.is_exact else x.to(self.dtype).to(torch.float32)

    def linear_input(self, x: Tensor) -> Tensor:
        """The fp32 values that a quantised linear multiplies with its weights; x [..., K] dtype."""
        x = x.to(torch.float32)
        return round_fp8(x) if self.rounds_inputs else x
