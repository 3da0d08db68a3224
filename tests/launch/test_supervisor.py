"""A run with real processes that stand in for coordinator and workers: what commands do to it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from command import CHECKPOINT, World

from evrun.expert_worker.wire.errors import UsageError
from evrun.launch import control

PS_KEYS = {"name", "run", "launcher_pid", "state", "processes"}
ROW_KEYS = {
    "role", "rank", "device", "pid", "state", "reason", "incarnation", "restarts", "last_layer", "progress_age_s", "resends",
    "dropped_replies", "backend", "rung", "bytes",
}  # fmt: skip


def test_ps_is_the_object_of_the_contract(served: World) -> None:
    view = json.loads(served.ok("ps", "--json"))
    assert set(view) == PS_KEYS
    assert all(set(row) == ROW_KEYS for row in view["processes"])
    assert [(row["role"], row["rank"], row["state"]) for row in view["processes"]] == [
        ("coordinator", None, "ready"), ("worker", 0, "ready"), ("worker", 1, "ready")
    ]  # fmt: skip
    assert view["launcher_pid"] not in [row["pid"] for row in view["processes"]]
    assert served.rank(1)["bytes"] == {"in-place": 7}
    assert "worker 1" in served.ok("ps")


def test_generate_asks_it(served: World) -> None:
    found = served.run("generate", "--prompt", "hi", "--max-new-tokens", "2")
    assert (found.returncode, found.stdout) == (0, "<104><105>\n")
    assert "prompt 2 tokens: ['104', '105']" in found.stderr


def test_a_second_launch_of_the_name_is_refused(served: World) -> None:
    refused = served.run("launch", "--checkpoint", str(CHECKPOINT), "--detach")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert f"already running, launcher pid {served.ps()['launcher_pid']}" in refused.stderr


def test_another_name_runs_beside_it(served: World) -> None:
    served.launch("--world", "1", name="b")
    assert served.ps("b")["run"] != served.ps()["run"]
    served.ok("stop", "--name", "b")
    assert served.ps()["state"] == "ready"
    gone = served.run("ps", "--name", "b")
    assert gone.returncode == 2
    assert "no run named 'b'" in gone.stderr
    assert "ready" in served.ok("logs", "launcher", "--name", "b")


def test_a_killed_worker_comes_back(served: World) -> None:
    before = served.rank(1)
    told = served.run("kill", "1", "--signal", "KILL")
    assert (told.returncode, told.stdout) == (0, "")
    assert f"SIGKILL sent to rank 1, incarnation {before['incarnation']}, pid {before['pid']}" in told.stderr
    after = _back(served, 1, before["incarnation"] + 1)
    assert after["restarts"] == before["restarts"] + 1
    assert after["pid"] != before["pid"]
    assert "killed by SIGKILL" in served.log("launcher.1.log")
    newest = f"worker-1.{after['incarnation']}.log"
    assert os.readlink(served.folder / "state/evrun/default/worker-1.log") == newest
    assert "worker 1 1 INFO hello" in served.ok("logs", "1", "--attempt", "1")


def test_hold_keeps_a_rank_down_until_restart(served: World) -> None:
    was = served.rank(0)["incarnation"]
    served.kill(0, signal.SIGTERM, hold=True)
    held = served.until(lambda: (r := served.rank(0))["state"] == "stopped" and r, "rank 0 is held")
    assert held["pid"] is None
    assert "evrun restart 0" in held["reason"]
    with pytest.raises(UsageError, match="rank 0 has no process now"):
        served.kill(0)
    assert served.run("restart", "0").returncode == 0
    _back(served, 0, was + 1)
    served.tell(control.Restart(0))
    _back(served, 0, was + 2)
    with pytest.raises(UsageError, match="expected 0 to 1, found 7"):
        served.tell(control.Restart(7))


def test_a_stopped_worker_can_be_replaced(served: World) -> None:
    was = served.rank(0)
    served.kill(0, signal.SIGSTOP)
    served.tell(control.Restart(0))
    assert _back(served, 0, was["incarnation"] + 1)["restarts"] == was["restarts"] + 1


def test_ctrl_c_cancels_a_request_and_not_the_run(served: World) -> None:
    popen = served.start("generate", "--prompt-ids", "1", "--max-new-tokens", "4000")
    assert popen.stdout is not None
    assert popen.stdout.read(3) == "<1>"
    popen.send_signal(signal.SIGINT)
    popen.communicate(timeout=10)
    assert popen.returncode == 130
    served.until(lambda: served.ps()["state"] == "ready", "the run is ready for the next request")


def test_the_background_holds_nothing_of_the_caller(served: World, tmp_path: Path) -> None:
    with open(tmp_path / "marker", "w") as marker:
        os.set_inheritable(marker.fileno(), True)
        served.launch("--world", "1", name="c")
        try:
            view = served.ps("c")
            for pid in [view["launcher_pid"], *(row["pid"] for row in view["processes"])]:
                held = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
                allowed = ("/dev/null", str(served.folder), "/memfd:evrun", "pipe:", "socket:", "anon_inode:")
                assert all(h.startswith(allowed) for h in held), (pid, held)
                assert os.getsid(pid) != os.getsid(0)
        finally:
            served.stop("c")


def test_junk_at_the_control_socket_changes_nothing(served: World) -> None:
    import zmq

    address = f"ipc://{served.folder}/run/evrun/default/control-{served.ps()['run']}.sock"
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 300)
        socket.connect(address)
        for junk in ([b"x"], [b"", b"", b"", b""], [b"wrong secret", control.codec.encode(control.Stop("no"))], [b"y" * 100_000, b"z"]):
            socket.send_multipart(junk)
        with pytest.raises(zmq.Again):
            socket.recv()
    assert served.ps()["state"] == "ready"
    assert "dropped a message" in served.log("launcher.1.log")


def _back(served: World, rank: int, incarnation: int) -> dict[str, Any]:
    found: dict[str, Any] = served.until(
        lambda: (r := served.rank(rank))["state"] == "ready" and r["incarnation"] == incarnation and r, f"rank {rank} is back"
    )
    return found
