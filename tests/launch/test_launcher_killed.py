"""SIGKILL of the launcher at random moments of start, serving and stop: nothing stays, and the name can be used again."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from command import CHECKPOINT, World

LAUNCH = ("launch", "--checkpoint", str(CHECKPOINT), "--world", "2", "--prompt-ids", "1,2", "--max-new-tokens", "10")
LATEST_S = 2.0
"""After this a launch with stand-ins is over on a machine that is not busy."""
GONE_WITHIN_S = 10.0
"""Long enough for a busy machine; what stays, stays for ever."""


@pytest.mark.parametrize(
    "moments", [pytest.param(5, marks=pytest.mark.slow), pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
def test_killed_at_random_moments(world: World, moments: int) -> None:
    random_ = random.Random(moments)
    for _ in range(moments):
        popen = world.start(*LAUNCH)
        time.sleep(random_.uniform(0.0, LATEST_S))
        popen.send_signal(signal.SIGKILL)
        popen.wait()
        world.settle(GONE_WITHIN_S)
    assert world.ok(*LAUNCH, timeout_s=60) == "<1><2>" * 5 + "\n"
    assert world.leftovers() == []


def test_killed_while_it_stops(world: World) -> None:
    world.launch("--world", "2", "--faults", world.faults({"rank": 0, "do": "stubborn"}))
    launcher = world.ps()["launcher_pid"]
    os.kill(launcher, signal.SIGTERM)
    world.until(lambda: world.log("launcher.1.log").count("killed by SIGTERM") == 1, "one worker is gone, the other one stubborn")
    os.kill(launcher, signal.SIGKILL)
    world.settle(GONE_WITHIN_S)
    world.launch("--world", "2")
    world.stop()
