"""`evrun doctor`: the arithmetic of the prediction, whether a plan fits, what is said of a machine, the command itself."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoint_files as files
import numpy as np
import pytest

from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.errors import RunError
from evrun.launch import cli, devices, nodes
from evrun.launch.config import RunConfig
from evrun.launch.devices import Card, Machine
from evrun.launch.doctor import facts, predict, rates, residency
from evrun.launch.doctor.examine import make_inputs, release_config, token_bytes
from evrun.launch.doctor.needs import dense_bytes, needs
from evrun.launch.doctor.predict import Inputs, Place
from evrun.launch.doctor.rates import CardRate, Rate, Rates
from evrun.launch.plan import make_plan

GOLDEN = Path(__file__).parents[1] / "golden"
FLAT = Rate(1e9, 2e9, 8e9)
RATES = Rates(2, Rate(4e9, 4e9, 16e9), FLAT, FLAT, FLAT, 1e-3, 1e10, 0.5e9, "a disk")
INPUTS = Inputs(
    layers=10, experts=48, top_k=6, hidden=64, row_bytes=2_000_000, attention_bytes=100_000_000, shared_bytes=20_000_000,
    head_bytes=50_000_000, coordinator_cores=(0,), ranks=(Place("cpu", (1,)), Place("cpu", (2,))), resident=1.0, registered=1.0,
    prompt_tokens=512, prefill_chunk=128, rates=RATES,
)  # fmt: skip


def test_a_rate_is_fitted_and_gives_its_points_back() -> None:
    rate = Rate.fit(1e9, 1.0, (16, 2.0), (64, 5.0))
    assert rate.seconds(1e9, 1) == pytest.approx(1.0)
    assert rate.seconds(1e9, 16) == pytest.approx(2.0)
    assert rate.seconds(1e9, 64) == pytest.approx(5.0)
    assert rate.seconds(2e9, 64) == pytest.approx(10.0)
    noisy = Rate.fit(1e9, 1.0, (16, 2.0), (64, 1.5))
    assert 0 < noisy.seconds(1e9, 128) < 10


def test_a_decode_step_by_hand() -> None:
    # Per layer: shared 2 MB at 1 GB/s on core 0; each rank 3 rows of 2 MB at 2 GB/s a core.
    parts = predict.step_seconds(INPUTS, 1)
    assert parts == {"attention": 0.1, "experts": pytest.approx(10 * 3e-3), "disk": 0.0, "calls": 0.01, "head": 0.05}
    assert predict.predict(INPUTS).decode_ms == pytest.approx(190.0)


def test_processes_that_share_a_core_take_turns() -> None:
    shared = dataclasses.replace(INPUTS, ranks=(Place("cpu", (1,)), Place("cpu", (0,))))
    assert predict.step_seconds(shared, 1)["experts"] == pytest.approx(10 * (3e-3 + 2e-3))
    one = dataclasses.replace(INPUTS, ranks=(Place("cpu", (1, 2)),))
    assert predict.step_seconds(one, 1)["experts"] == predict.step_seconds(INPUTS, 1)["experts"]


def test_rows_that_are_not_in_memory_are_read_first() -> None:
    cold = dataclasses.replace(INPUTS, resident=0.75)
    assert predict.step_seconds(cold, 1)["disk"] == pytest.approx(10 * 6 * 2e6 * 0.25 / 0.5e9)


def test_a_prefill_reads_every_weight_once_a_chunk() -> None:
    rows = predict.distinct_experts(48, 6, 128)
    assert 47.9 < rows < 48
    assert predict.distinct_experts(48, 6, 1) == pytest.approx(6)
    parts = predict.predict(INPUTS).prefill_parts_ms
    assert parts["attention"] == pytest.approx(1e3 * 4 * (0.1 / 2 + 0.1 * 128 / 8) / 512)
    assert parts["head"] == pytest.approx(1e3 * 4 * 0.05 / 512)
    shared = 2e6 / 2e9 + 2e6 * 128 / 8e9
    routed = rows / 2 * 2e6 * (1 / 4e9 + 128 * 6 / rows / 16e9) * 2  # each rank has one of two cores
    assert parts["experts"] == pytest.approx(1e3 * 4 * 10 * max(shared, routed) / 512)


def card_inputs(**card: Any) -> Inputs:
    rate = CardRate(50e9, "read-only shared mapping", 5e9, Rate(1e12, 1e12, 1e13), 0)
    on = RATES.__class__(**{**vars(RATES), "cards": {"GPU-a": dataclasses.replace(rate, **card)}})
    return dataclasses.replace(INPUTS, ranks=(Place("cuda:GPU-a", (1,)),), shared_bytes=0, rates=on)


def test_rows_of_a_card_come_over_its_link() -> None:
    def experts(i: Inputs) -> float:
        return predict.step_seconds(i, 1)["experts"]

    kernels = 10 * 6 * 2e6 / 1e12
    assert experts(card_inputs()) == pytest.approx(10 * 6 * 2e6 / 50e9 + kernels)
    assert experts(card_inputs(registered_bytes_per_s=None)) == pytest.approx(10 * 6 * 2e6 / 5e9 + kernels)
    assert experts(card_inputs(cache_bytes=10 * 48 * 1_000_000)) == pytest.approx(10 * 6 * 1e6 / 50e9 + kernels)
    half = dataclasses.replace(card_inputs(), registered=0.5)
    assert experts(half) == pytest.approx(10 * 6 * 1e6 * (1 / 50e9 + 1 / 5e9) + kernels)


def test_what_helps_is_sorted_and_worth_it() -> None:
    found = predict.what_helps(dataclasses.replace(INPUTS, resident=0.5))
    assert [f["decode_ms"] for f in found] == sorted(f["decode_ms"] for f in found)
    assert found[0]["change"] == "memory for all routed experts"
    assert all(float(f["saves_percent"]) >= 2 for f in found)
    assert not any("link" in str(f["change"]) for f in found)
    assert any("link" in str(f["change"]) for f in predict.what_helps(dataclasses.replace(card_inputs(), attention_bytes=0, head_bytes=0)))


@pytest.mark.parametrize(
    ("available", "verdict", "resident"),
    [(99, "no", 0.0), (100, "streams", 0.0), (150, "streams", 0.5), (200, "fits", 1.0), (900, "fits", 1.0)],
)
def test_fit(available: int, verdict: str, resident: float) -> None:
    found = predict.fit({"dense tree": 60, "slots": 40}, 100, available)
    assert (found.verdict, found.resident, found.needed_bytes) == (verdict, resident, 100)


def test_the_release_needs_what_it_takes() -> None:
    config = release_config()
    assert dense_bytes(config, "fp8") / 2**30 == pytest.approx(8.2, abs=0.15)
    assert dense_bytes(config, "bfloat16") / 2**30 == pytest.approx(14.5, abs=0.4)
    attention, shared, head = token_bytes(config)
    # Spec 2.1: the dense subtotal without the embedding, and the Engram's own projection.
    engram = 2 * (25600 * 6144 + 800 * 192 + 2 * 4 * 5120 * 2)
    assert attention + shared + head == 9_531_704_768 - 40 * 384 * 4 - 129280 * 5120 * 2 + engram
    plan = make_plan(RunConfig(checkpoint="x"), Machine((), "no driver", ((0,), (1,)), ""), config, {})
    assert set(needs(plan, config)) == {"dense tree", "processes", "prefill piece", "slots", "decode state"}
    inputs = make_inputs(config, plan, RATES, 1.0, 512)
    assert [p.cores for p in inputs.ranks] == [(1,), (0,), (1,), (0,)]


def test_rates_travel_as_json() -> None:
    before = card_inputs().rates
    assert Rates.from_json(json.loads(json.dumps(before.to_json()))) == before
    without = dataclasses.replace(before, experts=None)
    assert Rates.from_json(json.loads(json.dumps(without.to_json()))) == without


def test_a_child_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates.sys, "executable", "/bin/false")
    wanted = rates.Wanted("", [0], 1, [0], 1, "torch", "reference", "bfloat16", "fp8", 8, [], 1, "/tmp", 0)
    with pytest.raises(RunError, match="measuring exited with 1"):
        rates.measure(wanted)


def test_residency_follows_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(64 * mmap.PAGESIZE + 5))
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        mapping = np.frombuffer(mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
        assert residency.resident_pages(mapping).tolist() == [True] * 65
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if residency.resident_pages(mapping).all():
            pytest.skip("this file system keeps its files in memory")
        assert not residency.resident_pages(mapping).any()
        assert mapping[40 * mmap.PAGESIZE] >= 0
        assert residency.resident_pages(mapping)[40]


def test_share_of_a_checkpoint_s_experts(tmp_path: Path) -> None:
    files.write_mini(tmp_path / "c", scatter=2)
    assert residency.expert_share(Checkpoint.open(tmp_path / "c")) == 1.0


def scripted_nvml() -> Any:
    """What `facts` asks, for two cards; the second one's driver knows nothing of links."""

    def link(value: int) -> Any:
        def answer(handle: int) -> int:
            if handle:
                raise RuntimeError("Not Supported")
            return value

        return answer

    return SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlSystemGetDriverVersion=lambda: b"590.1",
        nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetMemoryInfo=lambda h: SimpleNamespace(total=100, free=60),
        nvmlDeviceGetPciInfo=lambda h: SimpleNamespace(busId=b"00000000:FF:00.0"),
        nvmlDeviceGetCudaComputeCapability=lambda h: (9, 0), nvmlDeviceGetMaxPcieLinkGeneration=link(5),
        nvmlDeviceGetMaxPcieLinkWidth=link(16), nvmlDeviceGetCurrPcieLinkGeneration=link(1), nvmlDeviceGetCurrPcieLinkWidth=link(16),
    )  # fmt: skip


def test_cards_with_their_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", scripted_nvml())
    machine = Machine(tuple(Card(i, f"GPU-{i}", "H", 100, (9, 0)) for i in range(2)), "", ((0,),), "")
    first, second = facts.cards(machine)
    assert (first["uuid"], first["link_generation"], first["link_width"], first["link_generation_now"]) == ("GPU-0", 5, 16, 1)
    assert (second["link_generation"], second["free_bytes"], second["capability"]) == (None, 60, [9, 0])
    assert facts.driver_version() == "590.1"


def test_numa_of_a_card_and_of_the_machine(tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    assert nodes.node_of("00000000:3B:00.0", tmp_path) == 1
    assert nodes.node_of("00000000:3C:00.0", tmp_path) is None
    node = tmp_path / "sys/devices/system/node/node0"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("0-2\n")
    (node / "meminfo").write_text("Node 0 MemTotal:       8 kB\nNode 0 MemFree:        2 kB\n")
    assert facts.numa_nodes(tmp_path) == [{"node": 0, "cpus": [0, 1, 2], "memory_bytes": 8192, "free_bytes": 2048}]


def test_mps_is_seen_by_its_pipe(tmp_path: Path) -> None:
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert facts.mps(env)["running"] is False
    (tmp_path / "control").write_text("")
    assert facts.mps(env)["running"] is True


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["--checkpoint", "/no/such/folder"], 3, "expected a checkpoint directory, found nothing"),
        (["--world", "0"], 2, "--world"),
        (["--device", "tpu"], 2, "--device"),
        (["--prompt-tokens", "1"], 2, "--prompt-tokens"),
        (["extra"], 2, "unexpected extra argument"),
        (["--device", "cuda", "--checkpoint", str(GOLDEN / "minimal/checkpoint")], 4, "rank 0 cannot have a card"),
    ],
)
def test_bad_arguments(
    arguments: list[str], exit_code: int, words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "find_cards", lambda: ([], "no driver"))
    assert cli.main(["doctor", *arguments]) == exit_code
    out, err = capfd.readouterr()
    assert out == ""
    assert words in err


def test_a_plan_that_does_not_fit(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available_memory_bytes", lambda root=None: 1 << 20)
    monkeypatch.setattr(facts, "available_memory_bytes", lambda root=None: 1 << 20)
    monkeypatch.setenv("EVRUN_CPU_KERNEL", "torch")
    assert cli.main(["doctor", "--device", "cpu", "--json"]) == 4
    out, err = capfd.readouterr()
    report = json.loads(out)
    assert (report["fit"]["verdict"], report["prediction"]) == ("no", None)
    assert report["checkpoint"]["expert_bytes"] == 288_777_830_400
    assert "the plan does not fit" in err.splitlines()[-1]


def test_a_small_checkpoint_from_end_to_end(capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint = str(GOLDEN / "minimal" / "checkpoint")
    assert cli.main(["doctor", "--checkpoint", checkpoint, "--device", "cpu", "--world", "2", "--prompt-tokens", "32", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["fit"]["verdict"] == "fits"
    assert report["checkpoint"]["resident_expert_percent"] is not None
    assert report["plan"]["world"] == 2
    assert report["machine"]["versions"]["numpy"]
    prediction = report["prediction"]
    again = prediction["inputs"]
    again["rates"] = Rates.from_json(again["rates"])
    again["ranks"] = tuple(Place(p["device"], tuple(p["cores"])) for p in again["ranks"])
    again["coordinator_cores"] = tuple(again["coordinator_cores"])
    assert vars(predict.predict(Inputs(**again))) == {k: v for k, v in prediction.items() if k != "inputs"}
    assert 0 < prediction["decode_ms"] < 1000
    assert prediction["decode_ms"] == pytest.approx(sum(prediction["decode_parts_ms"].values()))
