"""The routed-expert function in plain torch: the truth that every other backend is compared to.

Codes are expanded to fp32 in pieces of at most PIECE_BYTES and multiplied at once; no matrix of an expert ever exists.
Runs on one thread, so that a sum has one order whatever the number of cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from evrun.kernels.api import U8, BadScaleError, Combine, FfnShape, Row, tokens_of

PIECE_BYTES = 1 << 20
"""Expanded fp32 weights at a time. Scratch around it (gather indices) stays below twice this."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODES = np.array([*E2M1, *(-v for v in E2M1)], np.float32)
_PAIRS = np.stack([_CODES[np.arange(256) & 15], _CODES[np.arange(256) >> 4]], axis=1)
"""[256, 2]: the two values of a byte, low nibble first."""


def probe() -> str | None:
    """Always runs."""
    return None


def create(shape: FfnShape, max_tokens: int, top_k: int, threads: int, cpus: Sequence[int] | None = None) -> TorchReference:
    """`threads` is ignored, and torch is held to one thread in this process: see the module."""
    torch.set_num_threads(1)
    return TorchReference(shape)


def quantise_e4m3(x: torch.Tensor) -> torch.Tensor:
    """QDQ of activations [n, K] fp32 to E4M3 per 32 channels with a power-of-two scale (spec 3.2). Exact in bf16 too."""
    groups = x.view(*x.shape[:-1], -1, 32)
    t = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) * torch.tensor(1 / 448, dtype=torch.float32)
    mantissa, exponent = torch.frexp(t)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    q = torch.ldexp(groups, -exponent).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32)
    return torch.ldexp(q, exponent).flatten(-2)


class TorchReference:
    """kernels.api.CpuBackend in torch."""

    name = "torch-reference"

    def __init__(self, shape: FfnShape) -> None:
        self.shape = shape

    def call(
        self,
        x: npt.NDArray[Any],
        ids: npt.NDArray[np.int32],
        weights: npt.NDArray[np.float32],
        experts: Sequence[int],
        rows: Sequence[Row],
        out: npt.NDArray[Any],
        combine: Combine,
        beat: Callable[[], None] | None = None,
    ) -> int:
        if combine == "partial":
            out[:] = 0
        done = 0
        for position, (expert, row) in enumerate(zip(experts, rows, strict=True)):
            tokens, route = tokens_of(ids, weights, expert)
            if len(tokens):
                y = self._expert(self._load(x[tokens]), torch.from_numpy(route), row, position, beat)
                if combine == "partial":
                    out[tokens] += y.numpy()
                else:
                    out[done : done + len(tokens)] = self._store(y)
            done += len(tokens)
        return done

    def one_token(self, layers: int, experts: int, row_bytes: int, exact: bool, read: int) -> None:
        """See kernels.api.CpuBackend: this one has no short way."""

    def _expert(self, x: torch.Tensor, route: torch.Tensor, row: Row, position: int, beat: Callable[[], None] | None) -> torch.Tensor:
        """x [n, H] fp32, route [n] fp32 -> y [n, H] fp32, already rounded to dtype."""
        limit = self.shape.swiglu_limit
        x = self._quantise(x)
        g = self._linear(x, row.w1, row.s1, "w1", position, beat)
        u = self._linear(x, row.w3, row.s3, "w3", position, beat)
        a = torch.nn.functional.silu(g.clamp_max(limit)) * u.clamp(-limit, limit)
        a = self._round(route[:, None] * a)
        return self._linear(self._quantise(a), row.w2, row.s2, "w2", position, beat)

    def _linear(self, x: torch.Tensor, codes: U8, scales: U8, tensor: str, position: int, beat: Callable[[], None] | None) -> torch.Tensor:
        """x [n, K] fp32, codes [N, K/2], scales [N, K/32] -> [n, N] fp32, rounded to dtype."""
        bad = (scales == 255).any(axis=1)
        if bad.any():
            raise BadScaleError(position, tensor, int(bad.argmax()))
        out = torch.empty(x.shape[0], codes.shape[0])
        step = max(1, PIECE_BYTES // (4 * x.shape[1]))
        for start in range(0, codes.shape[0], step):
            piece = slice(start, start + step)
            values = torch.from_numpy(np.take(_PAIRS, codes[piece], axis=0)).view(-1, x.shape[1] // 32, 32)
            values *= torch.from_numpy(np.ldexp(np.float32(1), scales[piece].astype(np.int32) - 127))[..., None]
            out[:, piece] = x @ values.flatten(1).T
            if beat:
                beat()
        return self._round(out)

    def _quantise(self, x: torch.Tensor) -> torch.Tensor:
        return quantise_e4m3(x) if self.shape.numerics == "reference" else x

    def _round(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.bfloat16).to(torch.float32) if self.shape.dtype == "bfloat16" else x

    def _load(self, x: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(x).view(torch.bfloat16).to(torch.float32) if self.shape.dtype == "bfloat16" else torch.from_numpy(x)

    def _store(self, y: torch.Tensor) -> npt.NDArray[Any]:
        if self.shape.dtype == "float32":
            return y.numpy()
        stored: npt.NDArray[np.uint16] = y.to(torch.bfloat16).view(torch.uint16).numpy()
        return stored
