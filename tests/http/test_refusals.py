"""What is refused, how, and that nothing of it reaches the coordinator: a run with a key, two places to wait, 200 positions."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from runs import GOLDEN, evrun_in
from served import MODEL, Served, events, serving, until
from test_life import slow_script

KEY = "a-key-of-the-test"
MINIMAL = GOLDEN / "minimal" / "checkpoint"
HELLO = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("e")
    with (
        evrun_in(folder) as evrun,
        serving(
            evrun, "--max-queue", "2", "--max-context", "200", "--faults", slow_script(folder, 40), checkpoint=MINIMAL, world=1, key=KEY
        ) as run,
    ):
        yield run


def calls(served: Served) -> int:
    """Layer calls so far, by the bytes that they read."""
    return int(served.metric("evrun_row_bytes_total"))


BAD: list[tuple[str, dict[str, Any], str | None, str]] = [
    (TEXT, {"prompt": ""}, "prompt", "empty"),
    (TEXT, {"prompt": []}, "prompt", "empty"),
    (TEXT, {}, "prompt", "NoneType"),
    (TEXT, {"prompt": [0, 512]}, "prompt", "511"),
    (TEXT, {"prompt": [0, -1]}, "prompt", "-1"),
    (TEXT, {"prompt": [0, "x"]}, "prompt", "x"),
    (TEXT, {"prompt": [0, True]}, "prompt", "True"),
    (TEXT, {"prompt": ["a", "b"]}, "prompt", "one prompt, found 2"),
    (TEXT, {"prompt": {"a": 1}}, "prompt", "dict"),
    (TEXT, {"prompt": "a", "n": 2}, "n", "not supported"),
    (TEXT, {"prompt": "a", "n": 0}, "n", "not supported"),
    (TEXT, {"prompt": "a", "n": True}, "n", "not supported"),
    (TEXT, {"prompt": "a", "best_of": 3}, "best_of", "not supported"),
    (TEXT, {"prompt": "a", "echo": True}, "echo", "not supported"),
    (TEXT, {"prompt": "a", "logit_bias": {"1": 5}}, "logit_bias", "not supported"),
    (TEXT, {"prompt": "a", "frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens", "found 0"),
    (TEXT, {"prompt": "a", "max_tokens": -3}, "max_tokens", "found -3"),
    (TEXT, {"prompt": "a", "max_tokens": 2.5}, "max_tokens", "2.5"),
    (TEXT, {"prompt": "a", "temperature": -0.5}, "temperature", "-0.5"),
    (TEXT, {"prompt": "a", "temperature": "hot"}, "temperature", "hot"),
    (TEXT, {"prompt": "a", "top_p": 0}, "top_p", "found 0"),
    (TEXT, {"prompt": "a", "top_p": 1.1}, "top_p", "1.1"),
    (TEXT, {"prompt": "a", "seed": -1}, "seed", "-1"),
    (TEXT, {"prompt": "a", "stop": ""}, "stop", "empty"),
    (TEXT, {"prompt": "a", "stop": [""]}, "stop", "empty"),
    (TEXT, {"prompt": "a", "stop": ["x"] * 17}, "stop", "16"),
    (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs", "20"),
    (TEXT, {"prompt": "a", "stream": "yes"}, "stream", "yes"),
    (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    (TEXT, {"prompt": "a", "topp": 1}, "topp", "no such field"),
    (TEXT, {"prompt": [3] * 150, "max_tokens": 51}, "prompt", "201"),
    (CHAT, {"messages": []}, "messages", "at least one"),
    (CHAT, {}, "messages", "at least one"),
    (CHAT, {"messages": ["x"]}, "messages[0]", "object"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages", "content"),
    (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, "messages", "nobody"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]},
        "messages[0].content[0]",
        "images",
    ),
    (CHAT, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages", "tool"),
    (CHAT, {"messages": HELLO, "n": 3}, "n", "not supported"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "logprobs"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    (CHAT, {"messages": HELLO, "reasoning_effort": True}, "reasoning_effort", "True"),
    (CHAT, {"messages": HELLO, "reasoning_effort": 101}, "reasoning_effort", "101"),
    (CHAT, {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differs"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format", "text"),
    (
        CHAT,
        {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
        "tools[0].function.strict",
        "not supported",
    ),
    (
        CHAT,
        {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
        "tool_choice",
        "tool_choice",
    ),
    (CHAT, {"messages": HELLO, "max_tokens": 190}, "messages", "200"),
]


@pytest.mark.parametrize(("path", "fields", "param", "says"), BAD, ids=lambda v: json.dumps(v)[:40] if isinstance(v, dict) else None)
def test_a_400_names_its_field_and_nothing_is_computed(
    guarded: Served, path: str, fields: dict[str, Any], param: str | None, says: str
) -> None:
    before = calls(guarded)
    response = guarded.post(path, **fields)
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]
    assert calls(guarded) == before


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[1]", 400),
        (b'{"prompt": NaN}', 400),
        (b'{"temperature": 1e999, "prompt": "a"}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 500 + b"1" + b"}" * 500, 400),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400),
        (b'{"prompt": "' + b"a" * (9 << 20) + b'"}', 413),
    ],
)
def test_a_body_that_is_no_request(guarded: Served, data: bytes, status: int) -> None:
    response = guarded.http.post(TEXT, content=data, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]


def test_a_body_of_another_type(guarded: Served) -> None:
    response = guarded.http.post(TEXT, content=b"{}", headers={"Content-Type": "text/plain"})
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


def test_a_body_in_chunks_without_an_end(guarded: Served) -> None:
    """No Content-Length: the limit counts what comes."""
    response = guarded.http.post(TEXT, content=(b" " * 65536 for _ in range(200)), headers={"Content-Type": "application/json"})
    assert response.status_code == 413


def test_keys(guarded: Served) -> None:
    with httpx.Client(base_url=guarded.url, timeout=30) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": "Bearer"}):
            for method, path in (("GET", "/v1/models"), ("POST", TEXT), ("POST", CHAT), ("GET", "/metrics"), ("GET", "/v1/status")):
                refused = client.request(method, path, headers=headers)
                assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert client.get("/health").status_code == 200
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0) as wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    assert guarded.openai.models.list().data[0].id == MODEL
    arguments = [Path(f"/proc/{p['pid']}/cmdline").read_text() for p in guarded.evrun.ps()["processes"]]
    assert not any(KEY in text for text in arguments)
    assert not [p for p in guarded.evrun.folder.rglob("*") if p.is_file() and KEY.encode() in p.read_bytes()]


def test_paths_methods_and_models_that_are_not_there(guarded: Served) -> None:
    assert guarded.http.get("/nothing").json()["error"]["code"] == "not_found"
    assert guarded.http.get("/nothing").status_code == 404
    wrong = guarded.http.get(TEXT)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    for name, status in (("other", 404), ("", 400), (7, 400)):
        refused = guarded.http.post(TEXT, json={"model": name, "prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, "model")
    with pytest.raises(openai.NotFoundError):
        guarded.openai.completions.create(model="other", prompt="a")


def test_one_token_more_than_the_context(guarded: Served) -> None:
    assert guarded.complete([3] * 198, 2)["usage"]["total_tokens"] == 200
    refused = guarded.post(prompt=[3] * 199, max_tokens=2)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    assert all(number in error["message"] for number in ("200", "199", "201"))


def test_the_queue_its_limit_and_its_order(guarded: Served) -> None:
    done: list[int] = []

    def ask(number: int, new: int) -> None:
        assert guarded.complete([0, 3, 17], new)["usage"]["completion_tokens"] == new
        done.append(number)

    first = threading.Thread(target=ask, args=(0, 60))
    first.start()
    until(lambda: guarded.metric("evrun_requests_running") == 1, "the first runs", 20)
    others = []
    for number in (1, 2):
        others.append(threading.Thread(target=ask, args=(number, 2)))
        others[-1].start()
        until(lambda number=number: guarded.metric("evrun_requests_waiting") == number, f"{number} wait", 20)
    refused = guarded.post(prompt=[0, 3], max_tokens=1)
    assert (refused.status_code, refused.json()["error"]["type"], refused.json()["error"]["code"]) == (
        429,
        "rate_limit_error",
        "queue_full",
    )
    assert int(refused.headers["Retry-After"]) > 0
    until(lambda: guarded.health()[1]["requests"] == {"running": 1, "waiting": 2}, "the coordinator says the same", 10)
    for thread in (first, *others):
        thread.join(60)
    assert done == [0, 1, 2]
    assert guarded.complete([0, 3], 1)["usage"]["completion_tokens"] == 1


def test_a_waiting_client_that_leaves_makes_room(guarded: Served) -> None:
    with guarded.stream(prompt=[0, 3, 17], max_tokens=150, temperature=0, ignore_eos=True) as running:
        stream = events(running)  # kept: httpx closes with its iterator
        next(stream)
        waiting = [
            guarded.http.stream("POST", TEXT, json={"model": MODEL, "prompt": [0, 3], "max_tokens": 1, "stream": True}) for _ in range(2)
        ]
        for each in waiting:
            each.__enter__()
        until(lambda: guarded.metric("evrun_requests_waiting") == 2, "two wait", 20)
        assert guarded.post(prompt=[0, 3], max_tokens=1).status_code == 429
        for each in waiting:
            each.__exit__(None, None, None)
        until(lambda: guarded.metric("evrun_requests_waiting") == 0, "nobody waits", 20)
        with guarded.stream(prompt=[0, 3], max_tokens=1) as response:
            assert response.status_code == 200
    until(guarded.idle, "all places are free", 20)


def test_a_stream_that_waits_is_kept_alive(guarded: Served) -> None:
    """Headers at once, a comment line while nothing else comes."""
    with guarded.stream(prompt=[0, 3, 17], max_tokens=190, temperature=0, ignore_eos=True) as running:
        stream = events(running)  # kept: httpx closes with its iterator
        next(stream)
        with guarded.stream(prompt=[0, 3], max_tokens=1, temperature=0) as waiting:
            assert waiting.headers["content-type"].startswith("text/event-stream")
            assert next(line for line in waiting.iter_lines() if line).startswith(": queued, 1 ahead")
    until(guarded.idle, "all places are free", 20)


def test_bytes_that_are_no_http(guarded: Served) -> None:
    for sent in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000):
        with socket.create_connection(("127.0.0.1", guarded.port), timeout=30) as sock:
            sock.sendall(sent)
            head, _, body = _all(sock).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert json.loads(body)["error"]["code"] == "invalid_http"
    assert guarded.health()[0] == 200


def _all(sock: socket.socket) -> bytes:
    parts = []
    try:
        while part := sock.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)
