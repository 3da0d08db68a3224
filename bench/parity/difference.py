"""How far one array of rows is from another. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Difference:
    """Over all calls of a comparison."""

    rows: int
    max_abs: float
    rms_least: float
    """Relative root mean square of the closest call."""
    rms: float
    """Of the farthest call."""
    cosine: float
    """Smallest of any row."""
    argmax_equal: float
    """Share of rows whose largest channel is the same."""
    worst: str
    """Where `max_abs` is: call, row, channel."""


class Tally:
    """Adds calls up."""

    def __init__(self) -> None:
        self._rows = self._same = 0
        self._max_abs, self._worst = -1.0, ""
        self._rms: list[float] = []
        self._cosine = 1.0

    def add(self, where: str, got: F32, expected: F32) -> None:
        """got, expected [T, H] fp32."""
        gap = np.abs(got.astype(np.float64) - expected)
        row, channel = (int(i) for i in np.unravel_index(int(gap.argmax()), gap.shape))
        if gap[row, channel] > self._max_abs:
            self._max_abs, self._worst = float(gap[row, channel]), f"{where} [{row}, {channel}]"
        self._rms.append(relative_rms(got, expected))
        self._cosine = min(self._cosine, float(cosines(got, expected).min()))
        self._rows += len(got)
        self._same += int((got.argmax(axis=1) == expected.argmax(axis=1)).sum())

    def result(self) -> Difference:
        worst = self._worst if self._max_abs else "-"
        return Difference(self._rows, self._max_abs, min(self._rms), max(self._rms), self._cosine, self._same / self._rows, worst)


def relative_rms(got: F32, expected: F32) -> float:
    """||got - expected|| / ||expected||; 0 for two equal arrays, of zeros too."""
    gap = float(np.linalg.norm(got.astype(np.float64) - expected))
    return gap / float(np.linalg.norm(expected.astype(np.float64))) if gap else 0.0


def cosines(got: F32, expected: F32) -> npt.NDArray[Any]:
    """[T] of every row; 1 for two rows of zeros."""
    a, b = got.astype(np.float64), expected.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    dots = (a * b).sum(axis=1)
    result: npt.NDArray[Any] = np.where(norms > 0, dots / np.where(norms > 0, norms, 1), (a == b).all(axis=1))
    return result
