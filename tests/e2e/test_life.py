"""Lives and deaths with the real coordinator and workers: what a request, a run and the machine see of them."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
from runs import GOLDEN, Evrun, prompts, running

FULL = GOLDEN / "full" / "checkpoint"
MIXED = next(p for p in prompts("full") if p["name"] == "mixed")["ids"]


def slow_script(folder: Path, ms: float, ranks: range = range(8)) -> str:
    """Every call of these ranks takes up to `ms` longer, so that a request lasts."""
    path = folder / "slow.json"
    path.write_text(json.dumps([{"rank": r, "at": "read", "do": "stall", "ms": ms} for r in ranks]))
    return str(path)


def wait_for(what: str, condition, timeout_s: float = 30) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_kill_hold_and_restart_of_a_rank_while_a_request_runs(evrun: Evrun, tmp_path: Path) -> None:
    with running(evrun, FULL, "--combine", "exact", world=3):
        calm = evrun.dumped(MIXED)
        request = evrun.start(
            "generate", "--prompt-ids", ",".join(map(str, MIXED)), "--max-new-tokens", "16", "--temperature", "0", "--ignore-eos", "--json",
            "--dump-logits", str(tmp_path / "l.safetensors"),
        )  # fmt: skip
        evrun("kill", "1", "--signal", "KILL", "--hold")
        out, err = request.communicate(timeout=60)
        assert request.returncode == 0, err
        assert json.loads(out)["token_ids"] == calm.answer["token_ids"]
        assert (tmp_path / "l.safetensors").read_bytes() == calm.logits_file
        held = evrun.rank_once(1, pid=None)
        assert held["state"] not in ("ready", "serving")
        assert evrun.generate(MIXED)["token_ids"] == calm.answer["token_ids"]
        evrun("restart", "1")
        back = evrun.rank_once(1, state="ready")
        assert back["incarnation"] == 2
        evrun.generate(MIXED)
        assert evrun.ranks()[1]["last_layer"] >= 0


@pytest.mark.slow
def test_all_ranks_killed_at_once_and_the_request_finishes(evrun: Evrun, tmp_path: Path) -> None:
    with running(evrun, FULL, "--combine", "exact", "--faults", slow_script(tmp_path, 2), world=3):
        calm = evrun.generate(MIXED)
        request = evrun.start("generate", "--prompt-ids", ",".join(map(str, MIXED)), "--max-new-tokens", "16", "--temperature", "0",
                              "--ignore-eos", "--json")  # fmt: skip
        wait_for("the request runs", lambda: any(r["state"] == "serving" for r in evrun.ranks()))
        for rank in evrun.ranks():
            os.kill(rank["pid"], signal.SIGKILL)
        out, err = request.communicate(timeout=60)
        assert request.returncode == 0, err
        assert json.loads(out)["token_ids"] == calm["token_ids"]
        assert [r["restarts"] for r in evrun.ranks()] == [1, 1, 1]


@pytest.mark.slow
def test_a_stopped_worker_that_never_wakes_is_killed_and_comes_back(evrun: Evrun) -> None:
    with running(evrun, FULL, "--stall-timeout", "0.3", "--kill-timeout", "1.5", world=2):
        calm = evrun.generate(MIXED)
        os.kill(evrun.ranks()[1]["pid"], signal.SIGSTOP)
        assert evrun.generate(MIXED, new=2)["token_ids"] == calm["token_ids"][:2]
        stalled = evrun.ranks()[1]
        assert stalled["state"] in ("stalled", "restarting", "starting", "ready")
        back = evrun.rank_once(1, incarnation=2, state="ready")
        assert back["restarts"] == 1
        assert "no progress" in evrun("logs", "launcher").stdout


@pytest.mark.slow
def test_a_vanished_client_frees_the_engine(evrun: Evrun, tmp_path: Path) -> None:
    with running(evrun, FULL, "--faults", slow_script(tmp_path, 30), world=2):
        first = evrun.start("generate", "--prompt-ids", "0,3,17", "--max-new-tokens", "400", "--ignore-eos")
        wait_for("the request runs", lambda: any(r["state"] == "serving" for r in evrun.ranks()))
        first.kill()
        first.communicate()
        started = time.monotonic()
        assert len(evrun.generate([0, 3, 17], new=1)["token_ids"]) == 1
        assert time.monotonic() - started < 30  # 400 tokens of 10 layers at 30 ms would take two minutes


@pytest.mark.slow
def test_a_queue_is_served_in_order_and_its_limit_is_said(evrun: Evrun, tmp_path: Path) -> None:
    with running(evrun, FULL, "--faults", slow_script(tmp_path, 2), world=1):
        request = ("generate", "--prompt-ids", "0,3,17", "--max-new-tokens", "3", "--temperature", "0", "--ignore-eos", "--json")
        waiting = [evrun.start(*request) for _ in range(3)]
        answers = [json.loads(p.communicate(timeout=60)[0])["token_ids"] for p in waiting]
        assert all(a == answers[0] and len(a) == 3 for a in answers)


@pytest.mark.slow
def test_a_coordinator_that_dies_ends_the_launch(evrun: Evrun) -> None:
    evrun("launch", "--checkpoint", str(FULL), "--world", "2", "--detach")
    coordinator = next(p for p in evrun.ps()["processes"] if p["role"] == "coordinator")
    os.kill(coordinator["pid"], signal.SIGKILL)
    evrun.assert_nothing_left(within_s=10)
    evrun("ps", code=2)


@pytest.mark.slow
def test_two_runs_side_by_side_and_a_taken_name(evrun: Evrun) -> None:
    with running(evrun, FULL, world=1, name="a"), running(evrun, GOLDEN / "minimal" / "checkpoint", world=2, name="b"):
        assert evrun.ps("a")["run"] != evrun.ps("b")["run"]
        refused = evrun("launch", "--checkpoint", str(FULL), "--name", "a", "--detach", code=2)
        assert str(evrun.ps("a")["launcher_pid"]) in refused.stderr
        assert evrun.generate([0, 3], name="a", new=2)["world"] == 1
        assert evrun.generate([0, 3], name="b", new=2)["world"] == 2


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_a_request(evrun: Evrun, tmp_path: Path) -> None:
    popen = evrun.start("launch", "--checkpoint", str(FULL), "--world", "2", "--prompt-ids", "0,3,17", "--max-new-tokens", "500",
                        "--ignore-eos", "--faults", slow_script(tmp_path, 10), start_new_session=True)  # fmt: skip
    wait_for("the run is there", lambda: evrun("ps", "--json", code=None).returncode == 0)
    wait_for("the request runs", lambda: any(r["state"] == "serving" for r in evrun.ranks()))
    os.killpg(popen.pid, signal.SIGINT)
    _, err = popen.communicate(timeout=20)
    assert popen.returncode != 0
    assert "Traceback" not in err
    evrun.assert_nothing_left()
    assert not list((evrun.folder / "run").rglob("*.sock"))


def test_a_row_with_a_bad_scale_is_the_requests_error(evrun: Evrun, tmp_path: Path) -> None:
    from evrun.expert_worker.wire.checkpoint.reader import Checkpoint

    copy = tmp_path / "copy"
    shutil.copytree(FULL, copy)
    with running(evrun, FULL, world=1):
        routes = evrun.dumped([0, 3, 17], new=1).routes
    victim = int(routes["layers.4.expert_ids"][2, 0])
    scale = next(t for t in Checkpoint.open(copy).expert(4, victim) if t.name.endswith("w1.scale"))
    with scale.shard.open("r+b") as shard:
        shard.seek(scale.offset + 3 * scale.data.shape[1] + 1)
        shard.write(b"\xff")
    with running(evrun, copy, world=3):
        answer = evrun.generate([0, 3, 17], new=1, code=5)
        assert answer["finish_reason"] == "error"
        for part in (scale.name, "row 3", "255", str(scale.shard)):
            assert part in answer["error"]
        assert [r["incarnation"] for r in evrun.ranks()] == [1, 1, 1]
        clean = next(i for i in range(3, 400) if victim not in routes_of(evrun, [i]))
        assert evrun.generate([clean], new=1)["finish_reason"] == "length"
        assert [r["restarts"] for r in evrun.ranks()] == [0, 0, 0]


def routes_of(evrun: Evrun, ids: list[int]) -> list[int]:
    """Experts of layer 4 for a prompt; a prompt that meets the bad row has none that can be dumped."""
    path = evrun.folder / "r.safetensors"
    path.unlink(missing_ok=True)
    done = evrun("generate", "--prompt-ids", ",".join(map(str, ids)), "--max-new-tokens", "1", "--dump-routes", str(path), code=None)
    if done.returncode:
        return list(range(1 << 10))
    from safetensors.numpy import load_file

    return [int(e) for e in load_file(path)["layers.4.expert_ids"].ravel()]


@pytest.mark.slow
def test_a_replaced_shard_is_not_taken_by_a_restarted_worker(evrun: Evrun, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(FULL, copy)
    with running(evrun, copy, world=2):
        calm = evrun.generate(MIXED, new=4)
        shard = copy / "model-00003-of-00008.safetensors"
        shutil.copy(shard, tmp_path / "other")
        os.replace(tmp_path / "other", shard)
        evrun("kill", "1", "--signal", "KILL")
        failed = evrun.rank_once(1, state="failed")
        assert "checkpoint" in failed["reason"]
        assert "model-00003-of-00008.safetensors" in evrun("logs", "1").stdout
        assert evrun.generate(MIXED, new=4)["token_ids"] == calm["token_ids"]


def test_the_launcher_is_killed_while_it_serves(evrun: Evrun) -> None:
    evrun("launch", "--checkpoint", str(FULL), "--world", "3", "--detach")
    os.kill(evrun.ps()["launcher_pid"], signal.SIGKILL)
    evrun.assert_nothing_left()
    with running(evrun, FULL, world=1):
        assert evrun.generate([0, 3], new=2)["finish_reason"] == "length"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_launcher_is_killed_at_fifty_random_moments(evrun: Evrun) -> None:
    import random

    draw = random.Random(50)
    for _ in range(50):
        popen = evrun.start("launch", "--checkpoint", str(FULL), "--world", "3", "--prompt-ids", "0,3,17", "--max-new-tokens", "20",
                            "--ignore-eos")  # fmt: skip
        time.sleep(draw.uniform(0, 6))
        popen.kill()
        popen.communicate()
        evrun.assert_nothing_left()
    with running(evrun, FULL, world=1):
        assert evrun.generate([0, 3], new=2)["finish_reason"] == "length"


@pytest.mark.slow
def test_no_name_in_shared_memory_and_private_files(evrun: Evrun) -> None:
    before = set(os.listdir("/dev/shm"))
    with running(evrun, FULL, world=2):
        assert set(os.listdir("/dev/shm")) <= before
        for path in (evrun.folder / "run").rglob("*"):
            mode = path.lstat().st_mode & 0o777
            assert mode & 0o077 == 0, (path, oct(mode))
        for pid in evrun.pids():
            assert not [c for c in psutil.Process(pid).net_connections() if c.family.name != "AF_UNIX"]
