"""Deaths under a served run: what clients and /health see of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from runs import GOLDEN, Evrun
from served import Served, events, serving, until
from test_life import slow_script

pytestmark = pytest.mark.slow

MINIMAL = GOLDEN / "minimal" / "checkpoint"
IDS = [0, 3, 17, 60]


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(c["choices"][0]["text"] for c in chunks)


def test_a_worker_killed_in_mid_stream_and_the_text_is_the_same(evrun: Evrun, tmp_path: Path) -> None:
    slow = ("--faults", slow_script(tmp_path, 15))
    with serving(evrun, "--combine", "exact", *slow, checkpoint=MINIMAL) as served:
        calm = served.complete(IDS, 40)["choices"][0]["text"]
        with served.stream(prompt=IDS, max_tokens=40, temperature=0, ignore_eos=True) as response:
            stream = events(response)
            chunks = [next(stream) for _ in range(5)]
            victim = served.pid("worker", 1)
            os.kill(victim, signal.SIGKILL)
            seen: list[tuple[int, dict[str, Any]]] = []
            until(lambda: seen.append(served.health()) or "degraded" in seen[-1][1], "health shows the loss", 10)  # type: ignore[func-returns-value]
            status, body = seen[-1]
            assert (status, body["status"], [lack["rank"] for lack in body["degraded"]]) == (200, "degraded", [1])
            chunks += stream
        assert text_of(chunks) == calm
        until(lambda: served.health()[1]["status"] == "ok", "rank 1 is back", 60)
        assert served.metric("evrun_restarts_total") == 1
        assert served.complete(IDS, 40)["choices"][0]["text"] == calm


def test_a_coordinator_killed_in_mid_stream_comes_back(evrun: Evrun, tmp_path: Path) -> None:
    with serving(evrun, "--faults", slow_script(tmp_path, 15), checkpoint=MINIMAL) as served:
        before = served.complete(IDS, 6)["choices"][0]["token_ids"]
        for _ in range(2):
            with served.stream(prompt=IDS, max_tokens=60, temperature=0, ignore_eos=True) as response:
                stream = events(response)
                next(stream)
                os.kill(served.pid("coordinator"), signal.SIGKILL)
                *_, last = stream
            assert (last["error"]["code"], last["error"]["type"]) == ("coordinator_lost", "server_error")
            status, body = served.health()
            assert (status, body["status"]) in ((503, "loading"), (503, "coordinator_lost")), body
            refused = served.post(prompt=IDS, max_tokens=1)
            if refused.status_code != 200:  # it may be back already
                assert refused.status_code == 503
                assert int(refused.headers["Retry-After"]) > 0
            until(lambda: served.health()[1]["status"] == "ok", "the service is back", 90)
            assert served.complete(IDS, 6)["choices"][0]["token_ids"] == before
        coordinator = served.evrun.ps()["processes"][0]
        assert (coordinator["incarnation"], coordinator["restarts"]) == (3, 2)
        until(served.idle, "no place is held", 10)


def test_a_front_end_killed_is_replaced_behind_the_same_port(evrun: Evrun) -> None:
    with serving(evrun, checkpoint=MINIMAL) as served:
        before = served.complete(IDS, 3)
        os.kill(served.pid("http"), signal.SIGKILL)
        # The listening socket is the launcher's: a connection made meanwhile waits.
        with httpx.Client(base_url=served.url, timeout=60) as client:
            until(lambda: _status(client) == 200, "health", 30)
        assert served.complete(IDS, 3)["choices"] == before["choices"]
        assert served.evrun.ps()["processes"][-1]["incarnation"] == 2


def _status(client: httpx.Client) -> int:
    try:
        return client.get("/health").status_code
    except httpx.TransportError:
        return 0


def test_a_stopped_rank_does_not_count_and_none_left_is_503(evrun: Evrun) -> None:
    with serving(evrun, checkpoint=MINIMAL, world=1) as served:
        assert served.health()[0] == 200
        worker = served.pid("worker", 0)
        os.kill(worker, signal.SIGSTOP)
        try:
            until(lambda: served.health()[0] == 503, "a rank that stands still", 30)
            assert served.health()[1]["status"] == "no_rank"
        finally:
            os.kill(worker, signal.SIGCONT)
        until(lambda: served.health()[0] == 200, "it moves again", 30)


def test_sigterm_ends_within_its_bound_and_turns_new_requests_away(evrun: Evrun, tmp_path: Path) -> None:
    process = evrun.start(
        "serve", "--checkpoint", str(MINIMAL), "--world", "1", "--device", "cpu", "--port", "0", "--faults", slow_script(tmp_path, 100)
    )
    try:
        until(lambda: evrun("ps", "--json", code=None).returncode == 0 and evrun.ps()["state"] == "ready", "ready", 90)
        served = Served(evrun, None)
        with served.stream(prompt=IDS, max_tokens=500, temperature=0, ignore_eos=True) as response:
            stream = events(response)
            next(stream)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            until(lambda: served.health()[0] == 503, "draining", 5)
            refused = served.post(prompt=IDS, max_tokens=1)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
            *_, last = stream
            assert last["error"]["code"] == "stopping"
        served.close()
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, (out, err)
        assert time.monotonic() - began < 30  # the bound is 5 s and a little
    finally:
        process.kill()
        process.communicate()
    evrun.assert_nothing_left()


@pytest.mark.slow
def test_health_while_it_loads(evrun: Evrun) -> None:
    """From the first answer on: 503 with phase and bytes until the first 200, and requests are told to come again."""
    process = evrun.start("serve", "--checkpoint", str(MINIMAL), "--world", "1", "--device", "cpu", "--port", "0")
    try:
        until(lambda: evrun("ps", "--json", code=None).returncode == 0, "the launcher answers", 60)
        served = Served(evrun, None)
        seen = [served.health()]
        if seen[0][0] == 503:
            assert seen[0][1]["loading"].keys() == {"phase", "done_bytes", "total_bytes", "progress"}
        until(lambda: served.health()[0] == 200, "loaded", 90)
        served.close()
        evrun("stop")
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
