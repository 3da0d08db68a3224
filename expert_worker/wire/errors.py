"""Errors that reach a user: one line, one exit code.

Exit codes of the command contract: 2 usage or bad request, 3 checkpoint refused, 4 device or memory not available or
lost, 5 failed while running. Every message says what, where, expected, found and what to do.
"""

from __future__ import annotations

USAGE = 2
CHECKPOINT = 3
DEVICE = 4
RUNNING = 5


class EvrunError(Exception):
    """Base of every error a user may see. `exit_code` is what the command returns; `str(e)` is the one line."""

    exit_code = RUNNING


class UsageError(EvrunError):
    """Bad flag, bad request, unknown run or rank: nothing was started."""

    exit_code = USAGE


class CheckpointError(EvrunError):
    """The headers of a checkpoint show that it cannot be served. `problems` holds every finding, one line each."""

    exit_code = CHECKPOINT

    def __init__(self, where: str, problems: list[str]) -> None:
        self.where = where
        self.problems = problems
        super().__init__(where, problems)

    def __str__(self) -> str:
        return "\n".join([f"checkpoint {self.where} refused, {len(self.problems)} problem(s):", *self.problems])


class DeviceError(EvrunError):
    """A device or memory that was asked for is not available, or was lost."""

    exit_code = DEVICE


class PayloadError(EvrunError):
    """A value inside a tensor that no header shows: E8M0 byte 255, a NaN code. Names shard, tensor and row."""

    exit_code = RUNNING


class RunError(EvrunError):
    """A request failed while running."""

    exit_code = RUNNING
