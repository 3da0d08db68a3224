"""Scripted faults, for tests only: a worker does nothing of this unless its spec names faults.

A fault is {"rank": r, "incarnation": i or 0 for any, "call": n (its n-th call, from 1) or 0 for every, "at": point,
"do": action, "ms": milliseconds of a stall}. Points, in the order of a call: `receive`, `read`, `compute`, `write`.
Actions: `die`, `stall` (for ms; 0: for ever), and at `write`: `nan`, `malformed`, `twice`, `checksum`, `rows`, `delay`
(a random wait up to ms before the reply).
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from typing import Any

POINTS = ("receive", "read", "compute", "write")
ACTIONS = ("die", "stall", "nan", "malformed", "twice", "checksum", "rows", "delay")


@dataclass(frozen=True)
class Fault:
    call: int
    at: str
    do: str
    ms: float


class Faults:
    """The faults of one incarnation."""

    def __init__(self, script: list[dict[str, Any]], rank: int, incarnation: int) -> None:
        mine = [f for f in script if f["rank"] == rank and f.get("incarnation", 0) in (0, incarnation)]
        self._faults = [Fault(int(f.get("call", 0)), str(f["at"]), str(f["do"]), float(f.get("ms", 0))) for f in mine]
        assert all(f.at in POINTS and f.do in ACTIONS for f in self._faults), script
        self._random = random.Random(f"{rank}.{incarnation}")

    def __bool__(self) -> bool:
        return bool(self._faults)

    def at(self, point: str, call: int) -> str | None:
        """Dies or stalls here if the script says so; otherwise the name of what the reply must suffer, or None."""
        for fault in self._faults:
            if fault.at == point and fault.call in (0, call):
                if fault.do == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif fault.do == "stall":
                    time.sleep(fault.ms / 1000 if fault.ms else 1e9)
                elif fault.do == "delay":
                    time.sleep(self._random.uniform(0, fault.ms) / 1000)
                else:
                    return fault.do
        return None
