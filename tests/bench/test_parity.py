"""`evrun bench parity`: the golden figures come out, a wrong row is told, dumps are read, bad input is one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import checkpoint_files as files
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from evrun.bench.__main__ import bench
from evrun.bench.__main__ import main as bench_main
from evrun.bench.parity import paths
from evrun.bench.parity.difference import Difference, Tally
from evrun.bench.parity.stated import ALL, STATED, of

GOLDEN = Path(__file__).parents[1] / "golden"
MINIMAL = GOLDEN / "minimal"


def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """(exit code, rows, stderr) of the command in this process."""
    monkeypatch.setattr("sys.argv", ["evrun bench", "parity", *arguments, "--json"])
    code = bench_main()
    out, err = capfd.readouterr()
    return code, json.loads(out)["rows"] if out else [], err


def test_the_command_is_there() -> None:
    assert "parity" in bench.commands


def test_golden_figures_come_out(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, rows, err = run(capfd, monkeypatch, str(MINIMAL), "--backends", "native", "--world", "3")
    assert (code, err) == (0, "")
    found = {(r["data"], r["numerics"], r["dtype"]): r for r in rows if r["against"] == "recording"}
    assert set(found) == {(f"minimal/{data}", *arithmetic) for data in ("bf16", "fp32noaq") for arithmetic in ALL}
    assert all(row["holds"] for row in found.values())
    exact = found["minimal/bf16", "reference", "bfloat16"]
    assert (exact["max_abs"], exact["rms"], exact["argmax_equal"]) == (0, 0, 1)
    assert exact["cosine"] == pytest.approx(1)
    assert found["minimal/fp32noaq", "weights-only", "float32"]["rms"] < 1e-6
    worlds = {r["against"]: r for r in rows if r["world"] == 3}
    assert worlds["world 1, exact"]["max_abs"] == 0
    assert worlds["world 1, partial"]["rms"] < 1e-6


def damaged(tmp_path: Path) -> Path:
    """A golden folder with one prompt whose weights are not those it was recorded with."""
    folder = tmp_path / "minimal"
    shutil.copytree(MINIMAL / "checkpoint", folder / "checkpoint")
    (folder / "expected/bf16").mkdir(parents=True)
    shutil.copy(MINIMAL / "expected/bf16/text.safetensors", folder / "expected/bf16")
    ids = load_file(folder / "expected/bf16/text.safetensors")["layers.1.expert_ids"]
    name = f"layers.1.ffn.experts.{ids[0, 0]}.w2.scale"
    files.poke(folder / "checkpoint", name, 3, files.Raw(folder / "checkpoint")[name][3] + 2)
    return folder


def test_a_wrong_scale_is_told_with_its_place(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, rows, err = run(capfd, monkeypatch, str(damaged(tmp_path)), "--backends", "native", "--world", "0")
    assert code == 5
    assert [r["holds"] for r in rows if (r["numerics"], r["dtype"]) == ALL[0]] == [False]
    (line,) = err.splitlines()
    assert line.startswith("evrun: parity: ")
    assert "minimal/bf16, reference bfloat16: expected bit-equal, found relative rms" in line
    assert "layers.1 [" in line


def test_a_dump_is_compared_with_its_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_file(MINIMAL / "expected/bf16/text.safetensors")
    save_file({k: v for k, v in data.items() if k.startswith("layers.1.")}, tmp_path / "dump.safetensors")
    dump = str(tmp_path / "dump.safetensors")
    code, rows, _ = run(capfd, monkeypatch, dump, "--checkpoint", str(MINIMAL / "checkpoint"), "--backends", "native", "--world", "2")
    assert code == 0
    assert [r["against"] for r in rows] == ["recording", "world 1, partial", "world 1, exact"]
    assert {r["data"] for r in rows} == {"dump.safetensors"}
    assert rows[0]["max_abs"] == 0


@pytest.mark.slow
def test_all_golden_folders_with_every_backend(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, rows, err = run(capfd, monkeypatch, str(GOLDEN), "--backends", "native,torch", "--world", "4")
    assert (code, err) == (0, "")
    assert {r["data"].split("/")[0] for r in rows} == {"minimal", "full", "long"}
    # Sums differ in their last bits; a rounding step after them, to E4M3 or bf16, turns few of these into one of its own.
    limits = {("reference", "bfloat16"): 0, ("weights-only", "float32"): 1e-6}
    assert all(r["rms"] <= limits.get((r["numerics"], r["dtype"]), 1e-3) for r in rows if r["against"] == "torch")


@pytest.mark.slow
def test_without_recordings_it_makes_its_own(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, rows, _ = run(capfd, monkeypatch, "--backends", "native", "--world", "2")
    assert code == 0
    assert [r["against"] for r in rows] == ["recording", "world 1, partial", "world 1, exact"]
    assert rows[0]["rms"] < 1e-6


def test_paths_of_one_prompt(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = json.loads((MINIMAL / "greedy.json").read_text())
    prompt = json.loads((MINIMAL / "prompts.json").read_text())[0]
    arguments = ["--paths", "cpu,native", "--world", "2", "--tokens", "3", "--numerics", "weights-only", "--dtype", "float32"]
    code, rows, _ = run(capfd, monkeypatch, str(MINIMAL), *arguments)
    assert code == 0
    assert [(r["step"], r["backend"]) for r in rows] == [(step, path) for step in range(3) for path in ("cpu", "native")]
    assert [r["verdict"] for r in rows] == ["-", "same"] * 3
    recorded = greedy[prompt["name"]]["fp32noaq"]
    assert [r["token"] for r in rows if r["backend"] == "cpu"] == recorded[next(k for k in recorded if "ids" in k)][:3]
    assert all(len(r["top"].split("  ")) == 5 for r in rows)
    assert all(r["max_difference"] < 1e-4 for r in rows)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["/no/such/folder"], 2, "expected a golden folder or a file of --dump-activations, found nothing"),
        ([str(GOLDEN / "minimal/prompts.json"), "--checkpoint", str(MINIMAL / "checkpoint")], 2, "expected a safetensors file"),
        ([str(GOLDEN / "minimal/expected/bf16/text.safetensors")], 2, "give --checkpoint DIR"),
        ([str(MINIMAL / "expected/bf16/rand-24.layers.safetensors"), "--checkpoint", str(MINIMAL / "checkpoint")], 2, "moe_in, found none"),
        ([str(MINIMAL), "--backends", "gpu"], 2, "gpu: expected cpu, cuda"),
        ([str(MINIMAL), "--backends", "native-avx9"], 4, "this CPU has no such kernel"),
        ([str(MINIMAL), "--world", "two"], 2, "--world: expected integers"),
        ([str(MINIMAL), "--paths", "cpu", "--prompt-ids", "1,99999"], 2, "--prompt-ids: expected ids below 512, found 99999"),
        ([str(MINIMAL), "--tokens", "0"], 2, "--tokens"),
    ],
    ids=lambda v: " ".join(v)[-40:] if isinstance(v, list) else None,
)
def test_bad_input(
    arguments: list[str], exit_code: int, words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, rows, err = run(capfd, monkeypatch, *arguments)
    assert (code, rows) == (exit_code, [])
    (line,) = err.splitlines()
    assert words in line


def test_differences_by_hand() -> None:
    tally = Tally()
    tally.add("a", np.float32([[3, 4], [1, 0]]), np.float32([[3, 4], [0, 1]]))
    tally.add("b", np.float32([[0, 0]]), np.float32([[0, 0]]))
    d = tally.result()
    assert (d.rows, d.max_abs, d.rms_least, d.cosine, d.argmax_equal, d.worst) == (3, 1.0, 0.0, 0.0, pytest.approx(2 / 3), "a [1, 0]")
    assert d.rms == pytest.approx((2 / 26) ** 0.5)


def test_what_is_stated_is_held_to() -> None:
    def found(rms: float, max_abs: float) -> Difference:
        return Difference(1, max_abs, 0, rms, 1, 1, "")

    stated = STATED["bf16", "reference", "float32"]
    assert stated.holds(found(0.0229, 0.04))
    assert not stated.holds(found(0.025, 0.04))
    assert not stated.holds(found(0.001, 0.04)), "closer than this arithmetic can be: it is another one"
    assert not stated.holds(found(0.0229, 0.2))
    on_cpu, on_card = (of("bf16", ("reference", "bfloat16"), device) for device in ("cpu", "cuda:GPU-x"))
    assert on_cpu
    assert on_card
    assert (on_cpu.holds(found(1e-9, 1e-9)), on_card.holds(found(1e-4, 0.008)), on_card.holds(found(0.01, 0.008))) == (False, True, False)
    assert of("dump", ("reference", "bfloat16"), "cpu") is None


def test_a_near_tie_is_no_fault() -> None:
    logits = torch.linspace(-2, 2, 100)
    first = paths.Step(logits)
    swapped = logits.clone()
    swapped[[98, 99]] = swapped[[99, 98]]
    assert paths.verdict(first, first, 0.0, "float32") == "same"
    assert paths.verdict(first, paths.Step(swapped), float((swapped - logits).abs().max()), "float32") == "near tie"
    assert paths.verdict(first, paths.Step(-logits), 4.0, "bfloat16") == "FAULT"
