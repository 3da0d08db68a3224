"""Many clients, slow clients, leaving clients, and what the front end adds to a token: figures are printed, bounds are ratios."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import ssl
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import httpx
import psutil
import pytest
from alone import SECRET, alone
from runs import GOLDEN, Evrun
from served import MODEL, events, serving, until

from evrun.expert_worker.wire.requests import Generate, Started, Token
from evrun.launch import client

MINIMAL = GOLDEN / "minimal" / "checkpoint"
HELLO = [{"role": "user", "content": "Hi"}]


class Front(Protocol):
    """What the load needs: the whole run, or the front end alone."""

    url: str

    @property
    def port(self) -> int: ...

    @property
    def http_pid(self) -> int: ...

    def complete(self, ids: list[int], new: int) -> dict[str, Any]: ...

    def idle(self) -> bool: ...


@pytest.fixture(params=["an engine that only keeps time", "the model"])
def front(request: pytest.FixtureRequest, evrun: Evrun) -> Iterator[Front]:
    if request.param == "the model":
        with serving(evrun, "--max-queue", "40", checkpoint=MINIMAL) as served:
            until(lambda: served.health()[0] == 200, "a token can be produced", 60)
            yield served
    else:
        with alone(max_queue=40) as by_itself:
            yield by_itself


def request_bytes(front: Front, fields: dict[str, Any]) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": [0, 3], **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{front.port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.long
def test_idle_sockets_and_slow_readers_cost_a_normal_request_nothing(front: Front) -> None:

    def measure() -> float:
        spent = []
        for _ in range(60):
            began = time.perf_counter()
            assert front.complete([0, 3], 12)["usage"]["completion_tokens"] == 12
            spent.append(time.perf_counter() - began)
        return statistics.median(spent)

    measure()
    calm = measure()
    with contextlib.ExitStack() as stack:
        slow = []
        for _ in range(20):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", front.port))
            sock.sendall(request_bytes(front, {"max_tokens": 80, "stream": True, "ignore_eos": True}))
            slow.append(sock)
        for number in range(200):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", front.port)))
            if number % 2:
                sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
        until(front.idle, "the engine has nothing to do although nobody reads", 60)
        over = threading.Event()

        def sip() -> None:
            while not over.wait(1.0):
                for sock in slow:
                    with contextlib.suppress(OSError):
                        sock.recv(10, socket.MSG_DONTWAIT)

        sipping = threading.Thread(target=sip)
        sipping.start()
        try:
            crowded = measure()
        finally:
            over.set()
            sipping.join()
    again = measure()
    print(  # noqa: T201
    f"a request of 12 tokens: {calm * 1e3:.1f} and {again * 1e3:.1f} ms calm, {crowded * 1e3:.1f} ms with 200 idle and 20 slow: "
    f"{crowded / max(calm, again):.2f}"
    )
    assert crowded <= 1.2 * max(calm, again)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_thousand_mixed_requests_leak_nothing(front: Front) -> None:
    seen: Counter[str] = Counter()
    plain = ssl.create_default_context()  # made once: it would be most of each client's cost

    def one(number: int) -> None:
        chance = random.Random(number)
        kind = chance.random()
        with httpx.Client(base_url=front.url, timeout=60, verify=plain) as http:
            if kind < 0.1:
                broken: Any = chance.choice([b"{", b'{"model": 1}', json.dumps({"model": MODEL, "prompt": []}).encode(), b"\xff"])
                refused = http.post("/v1/completions", content=broken, headers={"Content-Type": "application/json"})
                assert refused.status_code == 400
                assert refused.json()["error"]["message"]
                seen["malformed"] += 1
            elif kind < 0.2:
                fields = {"model": MODEL, "prompt": [0, 3], "max_tokens": 400, "stream": True}
                with http.stream("POST", "/v1/completions", json=fields) as response:
                    if response.status_code == 200 and chance.random() < 0.7:
                        next(response.iter_raw())
                seen["left"] += 1
            elif kind < 0.5:
                fields = {"model": MODEL, "prompt": [0, 3], "max_tokens": 6, "stream": True, "ignore_eos": True}
                with http.stream("POST", "/v1/completions", json=fields) as response:
                    if response.status_code == 200:
                        assert list(events(response))[-1]["choices"][0]["finish_reason"] == "length"
                    seen[f"streamed {response.status_code}"] += 1
            else:
                path, what = ("/v1/chat/completions", {"messages": HELLO}) if kind < 0.7 else ("/v1/completions", {"prompt": "Hi"})
                whole = http.post(path, json={"model": MODEL, "max_tokens": 4, "ignore_eos": True, **what})
                assert whole.status_code in (200, 429), whole.text
                if whole.status_code == 200:
                    assert whole.json()["usage"]["completion_tokens"] == 4
                seen[f"whole {whole.status_code}"] += 1

    def rounds(numbers: range) -> tuple[int, int, int]:
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(one, numbers))
        until(front.idle, "nothing runs", 60)
        time.sleep(1.0)
        return process.num_fds(), process.num_threads(), process.memory_info().rss

    process = psutil.Process(front.http_pid)
    before = rounds(range(400))
    seen.clear()
    after = rounds(range(400, 1400))
    print(dict(seen), "descriptors, threads, bytes:", before, after)  # noqa: T201
    assert sum(seen.values()) == 1000
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    assert after[2] <= before[2] * 1.05


class Delays:
    """client.Listener that takes how long each token was on its way."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def queued(self, ahead: int) -> None: ...

    def started(self, started: Started) -> None: ...

    def prefill(self, done: int, total: int) -> None: ...

    def token(self, token: Token) -> None:
        self.found.append(time.perf_counter() - float(token.text))


@pytest.mark.long
def test_what_the_front_end_adds_to_a_token() -> None:
    """From the engine's hand to the client's, against the connection that `evrun generate` uses."""
    new = 200
    message = Generate(None, [0, 3], False, new, 0.0, 0, [], True, 0, None, None, None)
    with alone(pace_s=0.005) as front:
        direct = Delays()
        over_http: list[float] = []
        for _ in range(4):
            client.request(front.requests_path, SECRET, message, direct)
            fields = {"model": MODEL, "prompt": [0, 3], "max_tokens": new, "stream": True}
            with front.http.stream("POST", "/v1/completions", json=fields) as response:
                for chunk in events(response):
                    text = chunk["choices"][0]["text"]
                    over_http += [time.perf_counter() - float(stamp) for stamp in text.split()]
    mine, theirs = statistics.median(direct.found), statistics.median(over_http)
    print(f"a token on its way: {mine * 1e3:.2f} ms direct, {theirs * 1e3:.2f} ms over HTTP: {(theirs - mine) * 1e3:+.2f} ms")  # noqa: T201
    assert len(over_http) == len(direct.found) == 4 * new
    assert theirs - mine < 0.02  # generous: a busy machine; the figure is what is printed
