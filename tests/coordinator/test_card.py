"""What the build report says of the coordinator's card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evrun.coordinator import card
from evrun.coordinator.rank import Rank
from evrun.expert_worker.wire.errors import DeviceError


def rank(number: int, device: str) -> Rank:
    made = Rank(number)
    made.device = device
    return made


def test_who_shares_the_card() -> None:
    ranks = [rank(0, "cuda:GPU-a"), rank(1, "cuda:GPU-b"), rank(2, "cpu"), rank(3, "cuda:GPU-a")]
    assert card.sharing_lines("cuda:GPU-a", ranks, mps=False) == ["dense tree and rank 0, 3 share a card: time-sliced"]
    assert card.sharing_lines("cuda:GPU-b", ranks, mps=True) == ["dense tree and rank 1 share a card: MPS"]
    assert card.sharing_lines("cuda:GPU-c", ranks, mps=True) == card.sharing_lines("cpu", ranks, mps=True) == []


def test_the_daemon_is_known_by_its_pipe(tmp_path: Path) -> None:
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert not card.mps_runs(environment)
    (tmp_path / "control").touch()
    assert card.mps_runs(environment)


def test_a_torch_without_cards_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(DeviceError, match="cannot use cuda:GPU-1: Torch not compiled with CUDA enabled; use --coordinator cpu"):
        card.torch_device("cuda:GPU-1")
    assert card.torch_device("cpu") == "cpu"
