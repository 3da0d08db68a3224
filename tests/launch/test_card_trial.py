from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from evrun.expert_worker.card import trial
from evrun.kernels import registry
from evrun.launch.card_trial import Verdict, _verdict

ARGUMENTS = ["GPU-x", "/nowhere", "6", "384", "5120", "2304", "10.0", "reference", "bfloat16"]


@pytest.mark.parametrize(
    ("script", "verdict"),
    [
        ("print('ok cuda NVIDIA H200 cuda-wgmma')", Verdict("", "cuda")),
        ("print('ok triton NVIDIA H200 triton-mma\\ncuda: no compiler')", Verdict("", "triton", ("cuda: no compiler",))),
        ("print('kernel self-test of cuda-mma failed: far off')", Verdict("kernel self-test of cuda-mma failed: far off")),
        ("pass", Verdict("its trial said nothing")),
        ("raise SystemExit('broken')", Verdict("its trial exited with 1: broken")),
    ],
)
def test_verdicts(script: str, verdict: Verdict) -> None:
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert _verdict(child) == verdict


def test_the_preferred_sibling_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: dict[str, str | None] = {"cuda": None, "triton": None}
    monkeypatch.setattr(registry, "card_module", lambda name: SimpleNamespace(probe=lambda: reasons[name]))
    assert registry.card_names() == ["cuda", "triton"]
    assert registry.choose_card() == ("cuda", [])
    assert registry.choose_card("triton") == ("triton", [])
    reasons["cuda"] = "NVRTC not found"
    assert registry.choose_card() == ("triton", ["cuda: NVRTC not found"])
    with pytest.raises(registry.UnknownBackendError, match="no card kernel can run here: cuda: NVRTC not found"):
        registry.choose_card("cuda")
    reasons["triton"] = "Triton is not installed"
    with pytest.raises(registry.UnknownBackendError, match="cuda: NVRTC not found; triton: Triton is not installed"):
        registry.choose_card()


def test_unknown_sibling() -> None:
    with pytest.raises(registry.UnknownBackendError, match="card kernel 'opencl': unknown; known: cuda, triton"):
        registry.card_module("opencl")


def test_a_trial_without_any_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "card_module", lambda name: SimpleNamespace(probe=lambda: "no card is visible"))
    assert trial.main([*ARGUMENTS, "auto"]) == "no card kernel can run here: cuda: no card is visible; triton: no card is visible"
    assert trial.main([*ARGUMENTS, "triton"]) == "no card kernel can run here: triton: no card is visible"
