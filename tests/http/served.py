"""A served run driven over HTTP: real processes, a free port, folders of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from runs import GOLDEN, Evrun

FULL = GOLDEN / "full" / "checkpoint"
MODEL = "deepseek-v4.1-flash"


class Served:
    """One run of `evrun serve`."""

    def __init__(self, evrun: Evrun, key: str | None) -> None:
        self.evrun = evrun
        self.url = next(p for p in evrun.ps()["processes"] if p["role"] == "http")["device"]
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=120)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or "none", max_retries=0, timeout=120)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def http_pid(self) -> int:
        return self.pid("http")

    def close(self) -> None:
        self.http.close()
        self.openai.close()

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        return self.http.post(path, json={"model": MODEL, **fields})

    def complete(self, ids: list[int], new: int = 8, **fields: Any) -> dict[str, Any]:
        """A greedy completion that must succeed."""
        response = self.post(prompt=ids, max_tokens=new, **{"temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields})
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    @contextmanager
    def stream(self, path: str = "/v1/completions", **fields: Any) -> Iterator[httpx.Response]:
        with self.http.stream("POST", path, json={"model": MODEL, "stream": True, **fields}) as response:
            yield response

    def health(self) -> tuple[int, dict[str, Any]]:
        response = self.http.get("/health")
        return response.status_code, response.json()

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)

    def pid(self, role: str, rank: int | None = None) -> int:
        return next(p["pid"] for p in self.evrun.ps()["processes"] if (p["role"], p["rank"]) == (role, rank))

    def idle(self) -> bool:
        """Whether nothing runs or waits, here and in the coordinator."""
        body = self.health()[1]
        return self.metric("evrun_requests_running") + self.metric("evrun_requests_waiting") + sum(body["requests"].values()) == 0


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The data of each event up to [DONE], which must be the last line."""
    done = False
    for line in response.iter_lines():
        if line.startswith("data: "):
            assert not done
            done = line == "data: [DONE]"
            if not done:
                yield json.loads(line[6:])
        else:
            assert line == "" or line.startswith(": "), line
    assert done


def until(condition: Callable[[], Any], what: str, within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@contextmanager
def serving(evrun: Evrun, *args: str, checkpoint: Path = FULL, world: int = 2, key: str | None = None) -> Iterator[Served]:
    """A detached run on a free port; stopped at the end, and nothing of it may be left."""
    evrun.env["EVRUN_CPU_KERNEL"] = "torch"  # nothing to measure
    options = ("--world", str(world), "--device", "cpu", "--port", "0", "--detach", *args)
    if key:
        evrun.env["EVRUN_API_KEY"] = key
    evrun("serve", "--checkpoint", str(checkpoint), *options)
    served = Served(evrun, key)
    try:
        yield served
    finally:
        served.close()
        evrun("stop")
    evrun.assert_nothing_left()
