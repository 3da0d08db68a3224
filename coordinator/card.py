"""The dense tree on a card: the one card this process sees, and who else computes on it. Imports no torch until asked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from evrun.coordinator.rank import Rank
from evrun.expert_worker.wire.errors import DeviceError

MPS_FOLDER = "/tmp/nvidia-mps"


def pin(device: str) -> None:
    """Before anything of CUDA is loaded: this process sees the spec's card and no other."""
    if device != "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = device.partition(":")[2]


def torch_device(device: str) -> str:
    """What torch calls the spec's device, once pinned. Raises DeviceError when torch cannot use it."""
    if device == "cpu":
        return "cpu"
    import torch

    try:
        torch.empty(1, device="cuda:0")
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(f"--coordinator: torch {torch.__version__} cannot use {device}: {reason}; use --coordinator cpu") from error
    return "cuda:0"


def out_of_memory(error: Exception) -> bool:
    """Whether torch says that a card is full. By name: torch may not have been imported."""
    return type(error).__name__ == "OutOfMemoryError"


def sharing_lines(device: str, ranks: Sequence[Rank], mps: bool) -> list[str]:
    """How the coordinator's card is shared with workers, if it is: one line of the build report."""
    beside = [str(rank.rank) for rank in ranks if device != "cpu" and rank.device == device]
    return [f"dense tree and rank {', '.join(beside)} share a card: {'MPS' if mps else 'time-sliced'}"] if beside else []


def mps_runs(environment: Mapping[str, str]) -> bool:
    """Whether processes on a card run side by side through NVIDIA's MPS daemon instead of taking turns."""
    return os.path.exists(os.path.join(environment.get("CUDA_MPS_PIPE_DIRECTORY", MPS_FOLDER), "control"))
