"""Deaths of workers and what follows, with real processes that stand in for coordinator and workers."""

from __future__ import annotations

import pytest
from command import CHECKPOINT, World

from evrun.launch import control

pytestmark = pytest.mark.slow

BASE = ("launch", "--checkpoint", str(CHECKPOINT), "--world", "2")


def test_a_rank_that_cannot_start_is_failed_and_the_rest_serves(world: World) -> None:
    faults = world.faults({"rank": 1, "do": "exit", "code": 1, "words": "no kernel for this CPU"})
    found = world.run(*BASE, "--prompt-ids", "5", "--max-new-tokens", "1", "--faults", faults)
    assert (found.returncode, found.stdout) == (0, "<5>\n")
    assert "rank 1 is failed: 5 incarnations in a row served no call; the last exited with 1: no kernel for this CPU" in found.stderr
    log = world.log("launcher.1.log")
    assert log.count("started worker-1 ") == 5
    assert log.count("started worker-0 ") == 1


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        (4, 4, "rank 0 is lost: exited with 4: no device"),
        (3, 3, "refused the checkpoint: exited with 3: no device"),
        (1, 5, "rank 0 is failed: 5 inc"),
    ],
)
def test_a_detached_launch_promises_every_rank(world: World, code: int, exit_code: int, words: str) -> None:
    faults = world.faults({"rank": 0, "do": "exit", "code": code, "words": "no device"})
    found = world.run(*BASE, "--detach", "--faults", faults)
    assert found.returncode == exit_code
    assert words in found.stderr.splitlines()[-1]
    if code != 1:
        assert world.log("launcher.1.log").count("started worker-0 ") == 1
    world.settle()


def test_a_rank_that_is_lost_is_revived_by_restart(world: World) -> None:
    faults = world.faults({"rank": 0, "incarnation": 2, "do": "exit", "code": 4, "words": "card fell off the bus"})
    world.launch("--world", "2", "--faults", faults)
    world.kill(0)
    lost = world.until(lambda: (r := world.rank(0))["state"] == "lost" and r, "rank 0 is lost")
    assert "card fell off the bus" in lost["reason"]
    world.tell(control.Restart(0))
    world.until(lambda: (r := world.rank(0))["state"] == "ready" and r["incarnation"] == 3, "rank 0 is back")
    world.stop()


def test_the_coordinators_wish_to_kill_is_done(world: World) -> None:
    world.launch("--world", "1", "--faults", world.faults({"rank": "coordinator", "do": "kill-worker"}))
    world.until(lambda: world.rank(0)["incarnation"] >= 2, "rank 0 was replaced")
    assert "killed by SIGKILL (no progress for 30.0 s)" in world.log("launcher.1.log")
    world.stop()


def test_calls_served_reset_the_cap(world: World) -> None:
    world.launch("--world", "1", "--faults", world.faults({"rank": 0, "do": "calls"}))
    for incarnation in range(2, 9):
        world.kill(0)
        world.until(
            lambda i=incarnation: (r := world.rank(0))["incarnation"] == i and r["state"] == "serving", f"incarnation {incarnation}"
        )
    world.stop()


def test_logs_are_followed_through_restarts_until_the_run_is_over(world: World) -> None:
    world.launch("--world", "1")
    popen = world.start("logs", "0", "-f")
    assert popen.stdout is not None
    assert popen.stdout.readline().endswith(" worker 0 1 INFO hello\n")
    world.kill(0)
    assert popen.stdout.readline().endswith(" worker 0 2 INFO hello\n")
    world.stop()
    out, err = popen.communicate(timeout=20)
    assert (popen.returncode, out, err) == (0, "", "")
