"""Layer calls through real worker processes: golden expert path, every world, faults and losses."""

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from evrun.bench.herd import Herd, herd
from evrun.coordinator.expert_client import CancelledError
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.errors import DeviceError, RunError

GOLDEN = Path(__file__).parents[1] / "golden"
FULL = GOLDEN / "full" / "checkpoint"
LAYER = 9


class Case:
    """Golden input and output of one layer's routed experts."""

    def __init__(self, config: str, variant: str, prompt: str, layer: int) -> None:
        data = load_file(GOLDEN / config / "expected" / variant / f"{prompt}.safetensors")
        dtype = torch.bfloat16 if variant == "bf16" else torch.float32
        self.layer = layer
        self.x = torch.from_numpy(data[f"layers.{layer}.moe_in"]).to(dtype)
        self.ids = torch.from_numpy(data[f"layers.{layer}.expert_ids"])
        self.weights = torch.from_numpy(data[f"layers.{layer}.expert_weights"])
        self.expected = data[f"layers.{layer}.moe_routed_out"]

    def run(self, h: Herd, tokens: int | None = None) -> np.ndarray:
        t = slice(tokens)
        return h.experts(self.layer, self.x[t], self.ids[t], self.weights[t])().numpy().copy()


CASE = Case("full", "bf16", "rand-61", LAYER)


@pytest.mark.parametrize("transport", ["zmq", "doorbell"])
def test_golden_expert_path_bf16_is_bit_equal(transport: str) -> None:
    with herd(FULL, 4, transport=transport) as h:
        for prompt in ("chat", "mixed", "rand-61", "short-3"):
            for layer in (1, LAYER):
                case = Case("full", "bf16", prompt, layer)
                assert (case.run(h) == case.expected).all()


def test_golden_expert_path_fp32_without_quantisation() -> None:
    with herd(GOLDEN / "long" / "checkpoint", 3, numerics="weights-only", dtype="float32", chunk=256) as h:
        for prompt in ("text-long", "rand-201", "repeat-160"):
            case = Case("long", "fp32noaq", prompt, 6)
            out = case.run(h)
            assert np.linalg.norm(out - case.expected) <= 1e-6 * np.linalg.norm(case.expected)


def fault(do: str, at: str = "write", rank: int = 1, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "at": at, "do": do, "call": 1, **more}


@pytest.mark.parametrize("transport", ["zmq", "doorbell"])
@pytest.mark.parametrize("do", ["nan", "malformed", "twice", "checksum", "rows"])
def test_a_damaged_reply_is_dropped_and_its_experts_dealt_again(transport: str, do: str) -> None:
    with herd(FULL, 3, transport=transport, faults=[fault(do)], check_payload=do == "checksum") as h:
        for _ in range(3):
            assert (CASE.run(h) == CASE.expected).all()
        rank = h.fleet.ranks[1]
        rings_coalesce = do == "twice" and transport == "doorbell"
        assert rank.dropped == 1 or (rings_coalesce and rank.dropped == 0)
        assert rank.resends == h.experts.resends == (0 if do == "twice" else 1)
        assert h.processes[1].poll() is None


@pytest.mark.parametrize("at", ["receive", "read", "compute", "write"])
def test_a_death_at_any_point_of_a_call_costs_a_resend(at: str) -> None:
    with herd(FULL, 3, faults=[fault("die", at, incarnation=1)]) as h:
        assert (CASE.run(h) == CASE.expected).all()
        assert h.experts.resends == 1
        h.reap(1)
        h.start(1)
        h.settle()
        assert (CASE.run(h) == CASE.expected).all()
        assert h.fleet.ranks[1].calls == 1
        assert h.experts.resends == 1


def test_a_stalled_rank_is_dealt_around_and_rejoins_when_it_wakes() -> None:
    with herd(FULL, 3, stall_timeout_s=0.3) as h:
        assert (CASE.run(h) == CASE.expected).all()
        h.signal(1, signal.SIGSTOP)
        assert (CASE.run(h) == CASE.expected).all()
        assert h.fleet.ranks[1].state == "stalled"
        assert "no progress for" in h.fleet.ranks[1].reason
        assert (CASE.run(h) == CASE.expected).all()
        h.signal(1, signal.SIGCONT)
        h.settle()
        assert h.fleet.ranks[1].dropped == 1
        before = h.fleet.ranks[1].calls
        assert (CASE.run(h) == CASE.expected).all()
        assert h.fleet.ranks[1].calls == before + 1


def test_a_worker_stopped_between_computing_and_writing_changes_nothing_later() -> None:
    stall = {"rank": 1, "at": "compute", "do": "stall", "call": 2, "ms": 1500}
    with herd(FULL, 3, stall_timeout_s=0.3, faults=[stall]) as h:
        case = Case("full", "bf16", "chat", 1)
        assert (case.run(h) == case.expected).all()
        assert (CASE.run(h) == CASE.expected).all()
        deadline = time.monotonic() + 10
        while h.fleet.ranks[1].dropped == 0:
            assert (case.run(h) == case.expected).all()
            assert time.monotonic() < deadline
        assert (CASE.run(h) == CASE.expected).all()


def test_waiting_for_the_restart_instead_of_dealing_again() -> None:
    with herd(FULL, 2, on_loss="wait", faults=[fault("die", "read", incarnation=1)]) as h:
        collect = h.experts(CASE.layer, CASE.x, CASE.ids, CASE.weights)
        h.reap(1)
        h.start(1)
        assert (collect().numpy() == CASE.expected).all()
        assert h.fleet.ranks[1].calls == 1


def test_all_ranks_dead_waits_for_restarts() -> None:
    with herd(FULL, 2) as h:
        collect = h.experts(CASE.layer, CASE.x, CASE.ids, CASE.weights)
        for rank in (0, 1):
            h.signal(rank)
        for rank in (0, 1):
            h.reap(rank)
            h.start(rank)
        assert (collect().numpy() == CASE.expected).all()


def test_the_last_rank_gone_for_good_is_an_error_that_names_it() -> None:
    with herd(FULL, 1) as h:
        h.signal(0)
        h.reap(0, returns=False)
        with pytest.raises(DeviceError, match="rank 0: killed by SIGKILL"):
            CASE.run(h)


def test_two_workers_that_crash_the_same_way_are_the_requests_error() -> None:
    with herd(FULL, 3) as h:
        for rank in (0, 1):
            h.signal(rank, signal.SIGSTOP)
        h.experts(CASE.layer, CASE.x, CASE.ids, CASE.weights)
        collect = h.experts._collect
        h.signal(0, signal.SIGSEGV)
        h.signal(0, signal.SIGCONT)
        h.reap(0)
        h.signal(1, signal.SIGSEGV)
        h.signal(1, signal.SIGCONT)
        h.reap(1)
        out = collect().numpy()  # different experts died with them: no call failed twice
        assert (out == CASE.expected).all()


def test_world_larger_than_the_draws_waits_for_nobody() -> None:
    with herd(FULL, 8) as h:
        assert (CASE.run(h, tokens=1) == CASE.expected[:1]).all()
        assert sorted(r.calls for r in h.fleet.ranks) == [0, 0, 1, 1, 1, 1, 1, 1]


def test_every_token_on_one_rank() -> None:
    with herd(FULL, 4) as h:
        ids = torch.full((5, 1), 7, dtype=torch.int32)
        k = h.fleet.layout.top_k
        ids = torch.arange(k, dtype=torch.int32)[None].repeat(5, 1)
        out = h.experts(LAYER, CASE.x[:5], ids, torch.full((5, k), 0.5))().numpy()
        assert np.isfinite(out).all()
        assert np.abs(out).max() > 0


def test_a_cancelled_call_leaves_the_workers_usable() -> None:
    with herd(FULL, 2, faults=[fault("stall", "read", ms=400)]) as h:
        collect = h.experts(CASE.layer, CASE.x, CASE.ids, CASE.weights)
        h.experts.cancelled = lambda: True
        with pytest.raises(CancelledError):
            collect()
        h.experts.abandon()
        h.experts.cancelled = lambda: False
        assert (CASE.run(h) == CASE.expected).all()


def test_a_bad_scale_byte_is_the_requests_error_and_kills_nobody(tmp_path: Path) -> None:
    copy = tmp_path / "checkpoint"
    shutil.copytree(FULL, copy)
    tensor = next(t for t in Checkpoint.open(copy).expert(LAYER, int(CASE.ids[0, 0])) if t.name.endswith("w3.scale"))
    with tensor.shard.open("r+b") as shard:
        shard.seek(tensor.offset + 5 * tensor.data.shape[1])
        shard.write(b"\xff")
    with herd(copy, 3) as h:
        with pytest.raises(RunError) as error:
            CASE.run(h, tokens=1)
        for part in (tensor.name, "row 5", "found 255", f"layer {LAYER}"):
            assert part in str(error.value)
        h.experts.abandon()
        clean = next(t for t in range(len(CASE.ids)) if int(CASE.ids[0, 0]) not in CASE.ids[t].tolist())
        t = slice(clean, clean + 1)
        out = h.experts(LAYER, CASE.x[t], CASE.ids[t], CASE.weights[t])().numpy()
        assert (out == CASE.expected[t]).all()
        assert all(p.poll() is None for p in h.processes.values())
        assert list(h.incarnations.values()) == [1, 1, 1]
