"""How launches end, with real processes that stand in for coordinator and workers."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from command import CHECKPOINT, World

from evrun.launch import control

BASE = ("launch", "--checkpoint", str(CHECKPOINT), "--world", "2")


def test_a_prompt_starts_everything_answers_and_leaves_nothing(world: World) -> None:
    found = world.run(*BASE, "--prompt-ids", "5,6", "--max-new-tokens", "3")
    assert (found.returncode, found.stdout) == (0, "<5><6><5>\n")
    assert "routed experts: world 2" in found.stderr
    assert "prompt 2 tokens: ['5', '6']" in found.stderr
    assert "3 tokens in 0.8 s (prefill 0.50 s, 4.0 tokens/s; decode 0.25 s, 8.0 tokens/s), stopped on length" in found.stderr
    assert world.leftovers() == []


def test_json_is_the_object_of_the_contract(world: World) -> None:
    found = world.run(*BASE, "--prompt-ids", "5", "--max-new-tokens", "2", "--json", "--top-logits", "1", "--combine", "exact")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == {
        "prompt_ids": [5], "token_ids": [5, 5], "text": "<5><5>", "finish_reason": "length", "error": None, "world": 2,
        "workers": [{"rank": r, "device": "cpu", "backend": "stand-in", "incarnation": 1, "restarts": 0} for r in range(2)],
        "deal": "sorted", "combine": "exact", "numerics": "reference", "dtype": "bfloat16",
        "seconds": {"load": 1.0, "prefill": 0.5, "decode": 0.25}, "tokens_per_second": {"prefill": 2.0, "decode": 4.0},
        "resends": 0, "top_logits": [[[5, "x", 1.5]], [[5, "x", 1.5]]],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "exit_code", "words"),
    [
        ({"do": "exit", "code": 7, "words": "boom"}, 5, "coordinator exited with 7: boom"),
        ({"do": "exit", "code": 3, "words": "shard changed"}, 3, "coordinator exited with 3: shard changed"),
        ({"do": "fatal"}, 4, "9 GiB needed, 1 GiB free"),
    ],
)
def test_a_coordinator_that_ends_ends_the_launch(world: World, fault: dict[str, Any], exit_code: int, words: str) -> None:
    found = world.run(*BASE, "--prompt-ids", "1", "--json", "--faults", world.faults({"rank": "coordinator", **fault}))
    assert found.returncode == exit_code
    assert words in found.stderr.splitlines()[-1]
    if exit_code == 5:
        assert words in json.loads(found.stdout)["error"]
    else:
        assert found.stdout == ""


def test_a_coordinator_killed_during_a_request(world: World) -> None:
    popen = world.start(*BASE, "--prompt-ids", "1", "--max-new-tokens", "4000", "--json")
    view = world.until(lambda: (v := world.ps_or_none()) and v["state"] == "ready" and v, "the run is ready")
    assert popen.stderr is not None
    assert any("prompt 1 token" in line for line in popen.stderr)
    os.kill(view["processes"][0]["pid"], signal.SIGKILL)
    out, err = popen.communicate(timeout=20)
    assert popen.returncode == 5
    assert "killed by SIGKILL" in json.loads(out)["error"]
    assert json.loads(out)["finish_reason"] == "error"
    assert err.splitlines()[-1].count("killed by SIGKILL") == 1


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_signals_end_a_serving_run(world: World, number: signal.Signals, exit_code: int) -> None:
    popen = world.start(*BASE)
    world.until(lambda: (v := world.ps_or_none()) and v["state"] == "ready", "the run is ready")
    popen.send_signal(number)
    popen.communicate(timeout=10)
    assert popen.returncode == exit_code
    assert world.processes() == []
    assert world.leftovers() == []


def test_interrupted_while_it_loads(world: World) -> None:
    popen = world.start(*BASE, "--faults", world.faults({"rank": "coordinator", "do": "slow"}))
    world.until(lambda: world.ps_or_none(), "the launcher answers")
    popen.send_signal(signal.SIGINT)
    popen.communicate(timeout=10)
    assert popen.returncode == 130


@pytest.mark.parametrize("how", ["SIGINT", "stop"])
def test_ended_during_the_request(world: World, how: str) -> None:
    popen = world.start(*BASE, "--prompt-ids", "1", "--max-new-tokens", "4000")
    assert popen.stdout is not None
    assert popen.stdout.read(3) == "<1>"
    if how == "stop":
        world.tell(control.Stop("evrun stop"))
    else:
        popen.send_signal(signal.SIGINT)
    _, err = popen.communicate(timeout=20)
    assert popen.returncode == (5 if how == "stop" else 130)
    assert ("lost during the request: evrun stop" in err) == (how == "stop")
    assert world.processes() == []
    assert world.leftovers() == []


@pytest.mark.parametrize("how", ["interrupted", "killed"])
def test_a_detached_launch_that_ends_while_it_loads(world: World, how: str) -> None:
    popen = world.start(*BASE, "--detach", "--faults", world.faults({"rank": "coordinator", "do": "slow"}))
    view = world.until(world.ps_or_none, "the launcher answers")
    if how == "interrupted":
        popen.send_signal(signal.SIGINT)
    else:
        os.kill(view["launcher_pid"], signal.SIGKILL)
    _, err = popen.communicate(timeout=20)
    if how == "interrupted":
        assert popen.returncode == 130
        assert world.leftovers() == []
    else:
        assert popen.returncode == 5
        assert "the launcher killed by SIGKILL during the start" in err.splitlines()[-1]
    world.settle()
    world.launch("--world", "1")
    world.stop()


def test_a_coordinator_that_never_speaks(world: World) -> None:
    faults = world.faults({"rank": "coordinator", "do": "silent"})
    found = world.run(*BASE, "--faults", faults, "--start-timeout", "1")
    assert found.returncode == 5
    assert "coordinator: expected a sign of life within 1 s (--start-timeout), found none" in found.stderr.splitlines()[-1]
    assert "did not end within 1.0 s: SIGKILL" in world.log("launcher.1.log")


def test_stubborn_and_stopped_processes_are_killed_at_the_end(world: World) -> None:
    world.launch("--world", "2", "--faults", world.faults({"rank": 0, "do": "stubborn"}))
    world.kill(1, signal.SIGSTOP)
    world.stop()
    assert world.processes() == []


def test_a_killed_launcher_takes_everything_along_and_the_name_is_free(world: World) -> None:
    world.launch("--world", "2")
    stopped = world.rank(1)["pid"]
    os.kill(stopped, signal.SIGSTOP)
    os.kill(world.ps()["launcher_pid"], signal.SIGKILL)
    world.settle()
    over = world.run("generate", "--prompt", "x")
    assert over.returncode == 2
    assert "is over" in over.stderr
    world.launch("--world", "2")
    assert sorted(p.name for p in (world.folder / "run/evrun/default").glob("*.sock")) == [
        f"{what}-{world.ps()['run']}.sock" for what in ("control", "requests")
    ]
    world.stop()


def test_a_reader_that_leaves(world: World) -> None:
    popen = world.start(*BASE, "--prompt-ids", "1", "--max-new-tokens", "4000")
    assert popen.stdout is not None
    popen.stdout.read(6)
    popen.stdout.close()
    popen.stdout = open(os.devnull)  # noqa: SIM115 - for communicate
    popen.wait(timeout=20)
    assert popen.returncode == 141
    world.settle()


def test_a_full_disk_under_the_logs_does_not_end_the_run(world: World) -> None:
    """Every line that any process logs is lost; the answer is the same, and the loss is said once."""
    found = world.run(*BASE, "--prompt-ids", "5", "--max-new-tokens", "2", LOGS_ON_A_FULL_DISK="1")
    assert (found.returncode, found.stdout) == (0, "<5><5>\n")
    assert found.stderr.count("No space left on device; the run goes on, log lines are lost") == 1
