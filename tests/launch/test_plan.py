from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from command import CHECKPOINT
from hypothesis import given
from hypothesis import strategies as st

from evrun.coordinator.spec import CoordinatorSpec
from evrun.expert_worker.spec import WorkerSpec
from evrun.expert_worker.wire.checkpoint.config import ModelConfig, load_config
from evrun.expert_worker.wire.errors import DeviceError, UsageError
from evrun.launch.config import RUNGS, RequestConfig, RunConfig
from evrun.launch.cores import coordinator_cores, divide_cores
from evrun.launch.devices import Card, Machine
from evrun.launch.plan import (
    Plan,
    Wiring,
    cards_wanted,
    check_request,
    context_limit,
    falls_short,
    faults_for,
    make_plan,
)

MODEL: ModelConfig = load_config(CHECKPOINT)
CARDS = tuple(Card(i, f"GPU-{i}", "H", 1 << 30, (9, 0)) for i in range(2))
WIRING = Wiring("run", "secret", "ipc://h", "/r", 3, 4, [5, 6], [-1, -1], [-1, -1], 7, 8, "/cache")
IDENTITY = {"/c/m.safetensors": (1, 2, 3, 4)}


def machine(cards: tuple[Card, ...] = (), cores: int = 8) -> Machine:
    return Machine(cards, f"this machine has {len(cards)} card(s)" if cards else "no driver", tuple((c,) for c in range(cores)), "mask")


def plan(on: Machine | None = None, unfit: Any = None, faults: Any = (), **settings: Any) -> Plan:
    return make_plan(RunConfig(checkpoint="/c", **settings), on or machine(), MODEL, IDENTITY, faults, unfit)


def test_the_world_is_the_cards_found_else_four() -> None:
    assert plan().world == 4
    assert plan(machine(CARDS)).world == 2
    assert plan(machine(CARDS), world=3).world == 3
    assert plan(machine(CARDS), workers=("cpu", "cpu", "cpu")).world == 3


def test_auto_says_for_each_rank_why_it_has_no_card() -> None:
    assert plan(world=2).notes[:2] == ("rank 0 on the CPU: no driver", "rank 1 on the CPU: no driver")
    assert plan(machine(CARDS), unfit={"GPU-0": "no compiler"}, world=1).notes[0] == "rank 0 on the CPU: no compiler"
    mixed = plan(machine(CARDS), unfit={"GPU-0": "", "GPU-1": ""}, world=3)
    assert [seat.device for seat in mixed.ranks] == ["cuda:GPU-0", "cuda:GPU-1", "cpu"]
    assert mixed.notes[0] == "rank 2 on the CPU: this machine has 2 card(s)"
    assert not [note for note in plan(device="cpu", world=2).notes if note.startswith("rank")]


def test_deadlines_are_said() -> None:
    assert "deadlines without progress: start 600 s, first call 60 s, stall 0.5 s, kill 30 s" in plan(stall_timeout=0.5).notes


def test_card_kernels_and_why_a_preferred_one_is_not_used() -> None:
    made = plan(machine(CARDS), world=3).with_card_kernels({
        "cuda:GPU-0": ("triton", ("cuda: NVRTC 12.0 or newer not found",)),
        "cuda:GPU-1": ("cuda", ()),
    })  # fmt: skip
    assert [made.worker_spec(WIRING, rank, 1).card_kernel for rank in (0, 1)] == ["triton", "cuda"]
    assert "rank 0: card kernel triton, which is slower, is used; cuda: NVRTC 12.0 or newer not found" in made.notes
    assert not [note for note in made.notes if note.startswith("rank 1")]


def test_cards_by_name() -> None:
    shared = plan(machine(CARDS), workers=("cuda:1", "cuda:1", "cpu"))
    assert [seat.device for seat in shared.ranks] == ["cuda:GPU-1", "cuda:GPU-1", "cpu"]
    with pytest.raises(DeviceError, match=r"--workers cuda:2: rank 0 cannot have a card: this machine has 2 card\(s\)"):
        plan(machine(CARDS), workers=("cuda:2",))
    with pytest.raises(DeviceError, match="--device cuda: rank 0 cannot have a card: no driver"):
        plan(device="cuda")
    with pytest.raises(DeviceError, match="rank 1 cannot have a card: its trial was killed by SIGSEGV"):
        plan(machine(CARDS), unfit={"GPU-1": "its trial was killed by SIGSEGV"}, device="cuda")


def test_only_cards_that_a_rank_would_get_are_tried() -> None:
    def wanted(**settings: Any) -> list[str]:
        return [card.uuid for card in cards_wanted(RunConfig(checkpoint="/c", **settings), machine(CARDS))]

    assert wanted() == ["GPU-0", "GPU-1"]
    assert wanted(world=1) == ["GPU-0"]
    assert wanted(workers=("cuda:1", "cpu", "cuda:1")) == ["GPU-1"]
    assert wanted(device="cpu") == []


def test_workers_that_share_a_card_share_its_memory() -> None:
    def cache(rank: int, **settings: Any) -> int:
        return plan(machine(CARDS), **settings)._card_cache(f"cuda:GPU-{rank}")

    assert cache(0) == -1
    assert cache(1, workers=("cuda:1", "cuda:1", "cpu")) == (1 << 30) * 3 // 4 // 2
    assert cache(0, card_cache=5) == 5


def test_the_dense_tree_on_a_card() -> None:
    made = plan(machine(CARDS), coordinator="cuda:1")
    assert made.coordinator.device == "cuda:GPU-1"
    caches = [made._card_cache(f"cuda:GPU-{rank}") for rank in (0, 1)]
    assert caches == [-1, (1 << 30) // 2]
    with pytest.raises(DeviceError, match=r"--coordinator cuda:2: this machine has 2 card\(s\); use --coordinator cpu"):
        plan(machine(CARDS), coordinator="cuda:2")
    with pytest.raises(DeviceError, match="--coordinator cuda:0: no driver; use --coordinator cpu"):
        plan(coordinator="cuda:0")


def test_a_rung_that_the_cpu_does_not_have() -> None:
    with pytest.raises(DeviceError, match="--require arena: rank 0 runs on the CPU, whose rows are in-place"):
        plan(require="arena")
    assert plan(require="in-place").world == 4


def test_rungs_are_a_ladder() -> None:
    assert [[falls_short(rung, required) for rung in RUNGS] for required in RUNGS] == [
        [j > i for j in range(len(RUNGS))] for i in range(len(RUNGS))
    ]
    assert falls_short("", "in-place")


@given(cores=st.integers(1, 70), world=st.integers(1, 40), on_cards=st.booleans())
def test_cores_are_divided_and_never_oversubscribed(cores: int, world: int, on_cards: bool) -> None:
    own = coordinator_cores(cores, on_cards)
    shares, remark = divide_cores([(2 * c, 2 * c + 1) for c in range(cores)], world, own)
    assert len(shares) == world + 1
    assert all(shares)
    assert len(shares[0]) == own  # whatever the world
    used = [core for share in shares for core in share]
    sizes = list(map(len, shares[1:]))
    if cores >= own + world:
        assert sorted(used) == [(2 * c, 2 * c + 1) for c in range(cores)]
        assert max(sizes) - min(sizes) <= 1
        assert remark == ""
    else:
        assert set(sizes) == {1}
        loads = [sum((2 * c, 2 * c + 1) in share for share in shares[1:]) for c in range(cores)]
        assert max(loads) - min(loads) <= 1
        assert f"{world + 1} processes share {cores} core(s)" in remark


@given(
    nodes=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    wanted=st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=8),
    own=st.integers(1, 20),
)
def test_workers_sit_beside_their_cards(nodes: list[int], wanted: list[int | None], own: int) -> None:
    cores, world, own = [(i,) for i in range(len(nodes))], len(wanted), min(own, len(nodes))
    plain, _ = divide_cores(cores, world, own)
    shares, remark = divide_cores(cores, world, own, nodes, wanted)
    assert list(map(len, shares)) == list(map(len, plain))
    if "share" in remark or not remark:
        assert shares == plain
        return
    assert sorted(core for share in shares for core in share) == cores
    workers = list(zip(shares[1:], wanted, strict=True))
    for node in set(nodes):
        asked = sum(len(share) for share, want in workers if want == node)
        near = sum(nodes[core] == node for share, want in workers if want == node for (core,) in share)
        assert near >= min(asked, nodes.count(node))
    far = {r for r, (share, want) in enumerate(workers) if want is not None and any(nodes[core] != want for (core,) in share)}
    assert {int(word) for word in remark.replace(",", "").split() if word.isdigit()} == far


def test_the_plan_knows_the_nodes_of_cards_and_cores() -> None:
    cards = tuple(dataclasses.replace(card, node=1 - card.index) for card in CARDS)
    two = dataclasses.replace(machine(cards), core_nodes=(0, 0, 0, 0, 1, 1, 1, 1))
    made = plan(two, world=2)
    assert [seat.cpus for seat in (made.coordinator, *made.ranks)] == [(2, 3, 6, 7), (4, 5), (0, 1)]
    assert any("workers beside their cards" in note for note in made.notes)
    assert [seat.cpus for seat in plan(dataclasses.replace(two, core_nodes=()), world=2).ranks] == [(4, 5), (6, 7)]


def test_hyperthreads_are_pinned_to_but_not_counted() -> None:
    made = plan(dataclasses.replace(machine(), cores=((0, 8), (1, 9), (2, 10))), world=1)
    assert (made.coordinator.cpus, made.coordinator.threads) == ((0, 8), 1)
    assert (made.ranks[0].cpus, made.ranks[0].threads) == ((1, 2, 9, 10), 2)


def test_the_context_is_at_most_the_models() -> None:
    most = MODEL.max_position_embeddings
    assert context_limit(None, MODEL) == min(most, 32768)
    assert context_limit(None, dataclasses.replace(MODEL, max_position_embeddings=1 << 20)) == 32768
    assert context_limit(most, MODEL) == most
    with pytest.raises(UsageError, match=f"at most {most}, the model's maximum, found {most + 1}"):
        plan(max_context=most + 1)
    assert plan(max_context=10).prefill_chunk == 10


def test_requests_are_checked_before_anything_starts() -> None:
    def check(limit: int = 100, **request: Any) -> None:
        check_request(RequestConfig(**request), MODEL, limit)

    check(prompt_ids=(0, MODEL.vocab_size - 1), max_new_tokens=98)
    with pytest.raises(UsageError, match=f"ids below {MODEL.vocab_size}, the vocabulary, found {MODEL.vocab_size} at position 1"):
        check(prompt_ids=(0, MODEL.vocab_size), max_new_tokens=1)
    with pytest.raises(UsageError, match=r"at most 100 positions .* found prompt 2 tokens \+ 99 new = 101"):
        check(prompt_ids=(0, 1), max_new_tokens=99)
    with pytest.raises(UsageError, match=r"--max-new-tokens: expected at most 100 positions .* found 101"):
        check(prompt="x", max_new_tokens=101)
    with pytest.raises(UsageError, match="--top-logits"):
        check(prompt="x", max_new_tokens=1, top_logits=MODEL.vocab_size + 1)


def test_specs_carry_everything_both_ways(tmp_path: Path) -> None:
    faults = [{"rank": 1, "do": "die"}, {"rank": 1, "incarnation": 2, "do": "x"}, {"rank": "coordinator", "do": "y"}]
    made = plan(world=2, faults=faults, combine="exact", dtype="float32", max_context=64).with_cpu_kernel("native-avx2", "")
    wiring = WIRING
    file = tmp_path / "spec.json"
    worker = made.worker_spec(wiring, 1, 3)
    file.write_text(worker.dump())
    assert WorkerSpec.load(file) == worker
    assert (worker.rank, worker.incarnation, worker.call_fd, worker.reply_fd) == (1, 3, 4, 6)
    assert (worker.shard_identity, worker.backend) == (IDENTITY, "native-avx2")
    assert worker.faults == [{"rank": 1, "do": "die"}]
    coordinator = made.coordinator_spec(wiring, 1, 9)
    file.write_text(coordinator.dump())
    assert CoordinatorSpec.load(file) == coordinator
    assert (coordinator.call_fd, coordinator.reply_fds, coordinator.supervision_fd) == (3, [5, 6], 9)
    assert coordinator.faults == [{"rank": "coordinator", "do": "y"}]
    for spec in (worker, coordinator):
        assert (spec.combine, spec.dtype, spec.prefill_chunk, spec.world_size) == ("exact", "float32", 64, 2)
    assert json.loads(coordinator.dump())["max_context"] == 64


def test_faults_of_an_incarnation() -> None:
    faults = [{"rank": 0}, {"rank": 0, "incarnation": 0}, {"rank": 0, "incarnation": 2}, {"rank": 1}]
    assert faults_for(faults, 0, 1) == faults[:2]
    assert faults_for(faults, 0, 2) == faults[:3]
