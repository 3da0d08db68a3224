"""How far each arithmetic is from the golden recordings, as their README states it (expert path alone)."""

from __future__ import annotations

from typing import NamedTuple

from evrun.bench.parity.difference import Difference

Arithmetic = tuple[str, str]
"""(numerics, dtype)."""
ALL: tuple[Arithmetic, ...] = (
    ("reference", "bfloat16"),
    ("reference", "float32"),
    ("weights-only", "float32"),
    ("weights-only", "bfloat16"),
)


class Stated(NamedTuple):
    """The worst call's relative rms in percent, from the best to the worst folder, and the largest difference of any value."""

    least: float
    most: float
    max_abs: float = float("inf")
    unit: float = 0.1
    """Last digit of the range: figures of other code agree within one of it."""
    unit_abs: float = 0.01

    def holds(self, found: Difference) -> bool:
        percent = 100 * found.rms
        return self.least - self.unit <= percent <= self.most + self.unit and found.max_abs <= self.max_abs + self.unit_abs

    def __str__(self) -> str:
        if self.most == 0:
            return "bit-equal"
        return f"rms below {self.most / 100:g}" if not self.least else f"rms {self.least:g}-{self.most:g} %"


STATED: dict[tuple[str, str, str], Stated] = {
    ("bf16", "reference", "bfloat16"): Stated(0, 0, 0, 0, 0),
    ("bf16", "reference", "float32"): Stated(1.7, 2.3, 0.04),
    ("bf16", "weights-only", "float32"): Stated(4.9, 5.5, 0.06),
    ("bf16", "weights-only", "bfloat16"): Stated(4.9, 5.6),
    ("fp32noaq", "reference", "bfloat16"): Stated(4.8, 5.2),
    ("fp32noaq", "reference", "float32"): Stated(4.8, 5.2),
    ("fp32noaq", "weights-only", "float32"): Stated(0, 1e-4, unit=0),
    ("fp32noaq", "weights-only", "bfloat16"): Stated(0.3, 0.4, 0.005, unit_abs=0.001),
}
"""(data, numerics, dtype) -> what is stated."""

ON_CARDS: dict[tuple[str, str, str], Stated] = {
    ("bf16", "reference", "bfloat16"): Stated(0, 0.2, 0.02, 0, 0),
    ("fp32noaq", "weights-only", "float32"): Stated(0, 2e-4, unit=0),
}
"""Cards add in another order than the recording: fewer than 1 in 100 outputs are a rounding step off (tests/kernels/card_golden.py)."""


def of(data: str, arithmetic: Arithmetic, device: str) -> Stated | None:
    """What a backend on this device is held to; None for recordings that nothing is stated of."""
    key = (data, *arithmetic)
    return (None if device == "cpu" else ON_CARDS.get(key)) or STATED.get(key)
