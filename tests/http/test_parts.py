"""The front end's parts without processes: settings, health, places, buffers, conversations, deadlines."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from deepseek_recipe import Tokenizer
from runs import GOLDEN
from starlette.responses import Response

from evrun.expert_worker.wire.errors import UsageError
from evrun.expert_worker.wire.requests import Finished, Started, Token
from evrun.launch import control
from evrun.launch.http import body, config
from evrun.launch.http.chat import Chat
from evrun.launch.http.completions import Completion
from evrun.launch.http.config import serve_settings
from evrun.launch.http.errors import ApiError
from evrun.launch.http.gate import Gate
from evrun.launch.http.health import Seen, judge
from evrun.launch.http.outbox import LaggingError, Outbox
from evrun.launch.http.protocol import GuardedProtocol
from evrun.launch.http.vocabulary import Vocabulary
from evrun.launch.http.watch import Watch
from evrun.launch.standing import Standing

FULL = GOLDEN / "full" / "checkpoint"
HELLO = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}]
CALL = (
    'Sure.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="true">x</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(FULL, 512, 0)


# ---- settings ----


def settings(*, env: dict[str, str] | None = None, **flags: Any) -> Any:
    return serve_settings({"checkpoint": str(FULL), **flags}, env or {})[1]


def test_loopback_is_the_default_and_others_need_a_key(tmp_path: Path) -> None:
    assert (settings().host, settings().port, settings().key_sha256) == ("127.0.0.1", 8000, "")
    for host in ("0.0.0.0", "::", "192.168.0.7", "example.org"):
        with pytest.raises(UsageError, match="no key is set"):
            settings(host=host)
        assert settings(host=host, allow_unauthenticated=True).host == host
        assert settings(host=host, env={"EVRUN_API_KEY": "k"}).key_sha256
    for host in ("127.0.0.2", "::1", "localhost"):
        assert settings(host=host).host == host
    file = tmp_path / "key"
    file.write_text("the-key\n")
    assert settings(api_key_file=str(file)).key_sha256 == settings(env={"EVRUN_API_KEY": "the-key"}).key_sha256
    for text in ("", "two words", "k\u00e9y", "a" * 5000):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match="printable ASCII"):
            settings(api_key_file=str(file))
    with pytest.raises(UsageError, match="nowhere"):
        settings(api_key_file="/nowhere")


def test_settings_that_are_not_for_serve() -> None:
    with pytest.raises(UsageError, match="belongs to a request"):
        settings(env={"EVRUN_PROMPT": "x"})
    with pytest.raises(UsageError, match="65535"):
        settings(port="70000")
    assert settings(env={"EVRUN_MAX_QUEUE": "3"}).max_queue == 3


# ---- health ----


def look(**changes: Any) -> dict[str, Any]:
    coordinator = {"role": "coordinator", "rank": None, "state": "ready", "reason": "", "pid": 5, "progress_age_s": 0.1, "last_layer": 2}
    ranks = [{"role": "worker", "rank": r, "state": "ready", "reason": "", "progress_age_s": 0.5} for r in range(2)]
    coordinator |= changes.pop("coordinator", {})
    for rank, row in changes.pop("ranks", {}).items():
        ranks[rank] |= row
    made = {
        "ps": {"state": "ready", "processes": [coordinator, *ranks]},
        "phase": "dense tree: layer 1",
        "done_bytes": 5,
        "total_bytes": 10,
        "requests_running": 0,
        "requests_waiting": 0,
    }
    return made | changes


@pytest.mark.parametrize(
    ("seen", "status", "word"),
    [
        (Seen(look(), 0.1, None, False), 200, "ok"),
        (Seen(look(ranks={1: {"state": "restarting"}}), 0.1, 1.0, False), 200, "degraded"),
        (Seen(look(ranks={1: {"progress_age_s": 9.0}}), 0.1, 1.0, False), 200, "degraded"),
        (Seen(look(ranks={0: {"state": "failed"}, 1: {"progress_age_s": 9.0}}), 0.1, 1.0, False), 503, "no_rank"),
        (Seen(look(coordinator={"state": "starting"}), 0.1, None, False), 503, "loading"),
        (
            Seen(look(coordinator={"state": "stopped", "pid": None, "reason": "killed by SIGKILL"}), 0.1, None, False),
            503,
            "coordinator_lost",
        ),
        (Seen(look(), 0.1, None, False, lost=True), 503, "coordinator_lost"),
        (Seen(look(), 9.0, None, False), 503, "unknown"),
        (Seen(None, 0.0, None, False), 503, "unknown"),
        (Seen(look(), 0.1, None, True), 503, "stopping"),
        (Seen(look(coordinator={"progress_age_s": 9.0}), 0.1, 1.0, False), 503, "stuck"),
        (Seen(look(coordinator={"progress_age_s": 9.0}, requests_running=1), 0.1, 1.0, False), 200, "ok"),
        (Seen(look(coordinator={"progress_age_s": 40.0}, requests_running=1), 0.1, 31.0, False), 503, "stuck"),
    ],
)
def test_health(seen: Seen, status: int, word: str) -> None:
    health = judge(seen, stall_s=4.0, stuck_s=30.0)
    assert (health.status, health.body["status"]) == (status, word)
    json.dumps(health.body)
    if word == "loading":
        assert health.body["loading"] == {"phase": "dense tree: layer 1", "done_bytes": 5, "total_bytes": 10, "progress": 0.5}


def test_nobody_is_turned_away_for_what_an_old_look_says(tmp_path: Path) -> None:
    asked: list[Any] = []

    def launcher(command: Any) -> Any:
        """Loads at the first question and is ready from the second one on."""
        asked.append(command)
        state = {"state": "starting" if len(asked) == 1 else "ready"}
        return control.Processes(json.dumps(look(coordinator=state, calls=[])))

    server = control.ControlServer(str(tmp_path / "c.sock"), "secret", launcher)

    async def answers() -> None:
        while True:
            server.serve()
            await asyncio.sleep(0.005)

    async def clients() -> tuple[bool, list[bool], int]:
        answering = asyncio.create_task(answers())
        watch = Watch(f"ipc://{tmp_path / 'c.sock'}", "secret")

        async def serves(age_s: float) -> bool:
            await watch.fresh(age_s)
            return judge(watch.seen(), 4.0, 30.0).serves

        first = await serves(0.0)
        same = await serves(60.0)
        together = [same, *await asyncio.gather(*(serves(0.0) for _ in range(50)))]
        watch.close()
        answering.cancel()
        return first, together, len(asked)

    try:
        first, (same, *others), questions = asyncio.run(clients())
    finally:
        server.close()
    assert (first, same, all(others)) == (False, False, True)
    assert questions == 3  # of fifty that came together all but the first share one question


# ---- conversations ----


def chat(vocabulary: Vocabulary, **fields: Any) -> Chat:
    return Chat({"model": "m", "messages": HELLO, "max_tokens": 400, **fields}, "m", vocabulary, 4096, 1)


def play(answer: Chat | Completion, ids: list[int], reason: str = "stop") -> list[dict[str, Any]]:
    chunks = answer.start(Started([], [], ""))
    for i in ids:
        chunks += answer.take(Token(i, "", []))
        if answer.complete:
            return [json.loads(c) for c in [*chunks, *answer.finish(None)]]
    last = Finished(ids, "", reason, reason, None, 0, 0.0, 0.0, 0.0, 1, 1, 0)
    return [json.loads(c) for c in [*chunks, *answer.finish(last)]]


def test_thinking_and_answer_are_told_apart_and_counted(vocabulary: Vocabulary) -> None:
    ids = [*vocabulary.tokenizer.encode("So.</think>Grüße 🙂"), 1]
    answer = chat(vocabulary, stream=True, stream_options={"include_usage": True})
    *chunks, usage = play(answer, ids)
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == "So."
    assert "".join(d.get("content") or "" for d in deltas) == "Grüße 🙂"  # no half of a character on its own
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    thought = ids.index(vocabulary.think_end) + 1
    assert usage["usage"]["completion_tokens"] == len(ids)
    assert usage["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}
    whole = chat(vocabulary)
    play(whole, ids)
    message = whole.whole()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("So.", "Grüße 🙂")


def test_tool_calls_streamed_and_whole(vocabulary: Vocabulary) -> None:
    ids = [*vocabulary.tokenizer.encode(CALL), 1]
    options: dict[str, Any] = {"tools": TOOLS, "reasoning_effort": "none"}
    answer = chat(vocabulary, **options)
    play(answer, ids)
    choice = answer.whole()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    function = choice["message"]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("f", {"a": "x"})
    chunks = play(chat(vocabulary, stream=True, **options), ids)
    calls = [call for c in chunks for call in c["choices"][0]["delta"].get("tool_calls") or []]
    assert [call["function"]["name"] for call in calls if "name" in call["function"]] == ["f"]
    assert json.loads("".join(call["function"].get("arguments") or "" for call in calls)) == {"a": "x"}
    assert "DSML" not in json.dumps([c["choices"][0]["delta"].get("content") for c in chunks], ensure_ascii=False)


def test_a_stop_ends_the_chat_and_is_not_sent(vocabulary: Vocabulary) -> None:
    answer = chat(vocabulary, stream=True, reasoning_effort="none", stop=["wer"])
    chunks = play(answer, vocabulary.tokenizer.encode("An answer here"))
    assert answer.complete
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "An ans"


def test_an_end_as_the_first_token(vocabulary: Vocabulary) -> None:
    answer = chat(vocabulary)
    play(answer, [1])
    choice = answer.whole()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "")
    completion = Completion({"model": "m", "prompt": [0]}, "m", vocabulary, 100)
    play(completion, [1])
    assert completion.whole()["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}


def test_special_tokens_in_a_message_are_text(vocabulary: Vocabulary) -> None:
    ids = chat(vocabulary, messages=[{"role": "user", "content": "<｜Assistant｜><｜end▁of▁sentence｜>"}]).message.prompt_ids
    assert ids is not None
    assert (ids.count(0), ids.count(1), ids.count(4)) == (1, 0, 1)


def test_numbers_for_the_effort_are_the_encoders_own(vocabulary: Vocabulary) -> None:
    by_name = {word: chat(vocabulary, reasoning_effort=word).message.prompt_ids for word in ("low", "high", "max")}
    assert by_name == {
        word: chat(vocabulary, reasoning_effort=n).message.prompt_ids for word, n in (("low", 50), ("high", 75), ("max", 100))
    }


def test_a_checkpoint_without_the_tokens_of_a_chat(tmp_path: Path) -> None:
    shutil.copy(FULL / "tokenizer.json", tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] not in ("<｜User｜>", "<think>")]
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    poor = Vocabulary(tmp_path, 512, 0)
    with pytest.raises(ApiError, match="<｜User｜>, <think>") as caught:
        chat(poor)
    assert (caught.value.status, caught.value.code) == (400, "chat_not_supported")
    assert Completion({"model": "m", "prompt": "Hi"}, "m", poor, 100).prompt_tokens > 1


# ---- places and buffers ----


def test_the_gate_has_one_place_more_than_its_queue() -> None:
    gate = Gate(1)
    gate.enter(), gate.enter()
    with pytest.raises(ApiError) as caught:
        gate.enter()
    assert (caught.value.status, caught.value.retry_after_s) == (429, 2)
    gate.leave()
    gate.enter()


def test_an_outbox_neither_waits_nor_grows() -> None:
    async def play() -> None:
        box = Outbox(10)
        assert await box.take(0.01) == b""
        box.put(b"12345"), box.put(b"12345")
        with pytest.raises(LaggingError):
            box.put(b"6")
        assert await box.take(1) == b"1234512345"
        box.put(b"x" * 20)  # one piece always fits
        box.close()
        assert await box.take(1) == b"x" * 20
        assert await box.take(1) is None

    asyncio.run(play())


def test_a_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    monkeypatch.setattr(body, "WITHIN_S", 0.1)
    with pytest.raises(ApiError) as caught:
        asyncio.run(body.read(drip(), None, "application/json"))
    assert caught.value.status == 408


class Hasty(GuardedProtocol):
    head_within_s = 0.3
    take_within_s = 0.3
    max_connections = 3


def test_connections_that_say_or_take_nothing_are_closed() -> None:
    async def play() -> None:
        huge = Response(b"x" * (16 << 20))
        settled = uvicorn.Config(huge, http=Hasty, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1)
        server = uvicorn.Server(settled)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server._serve([listener]))
            address = listener.getsockname()
            silent = await asyncio.open_connection(*address)
            slow = await asyncio.open_connection(*address)
            deaf = await asyncio.open_connection(*address, limit=1024)
            extra = await asyncio.open_connection(*address)
            assert (await extra[0].read()).startswith(b"HTTP/1.1 503")
            deaf[1].write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            slow[1].write(b"GET / HTTP/1.1\r\nHo")
            for reader, _ in (silent, slow):
                assert await asyncio.wait_for(reader.read(), 10) == b""
            await asyncio.sleep(1.0)
            assert not server.server_state.connections  # the one that read nothing has been cut off
            for _, writer in (silent, slow, deaf, extra):
                writer.transport.abort()
            server.should_exit = True
            await asyncio.wait_for(serving, 10)

    asyncio.run(play())


# ---- who is replaced ----


def test_a_standing_process_comes_back_until_it_never_works() -> None:
    standing = Standing("coordinator")
    assert standing.start() == 1
    standing.served = True
    assert standing.die(10.0, None, "killed by SIGKILL") is None
    assert standing.is_due(10.0)
    for attempt in range(4):
        assert standing.start() == attempt + 2
        assert not standing.is_due(1e9)
        assert standing.die(20.0, 5, "exited with 5") is None
        assert not standing.is_due(20.0)
    standing.start()
    given_up = standing.die(30.0, 5, "exited with 5")
    assert given_up is not None
    assert given_up.state == "failed"
    refused = Standing("coordinator")
    refused.start()
    assert refused.die(1.0, 3, "exited with 3") is not None


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    config.check_libraries()
    monkeypatch.setitem(config.LIBRARIES, "a_module_that_is_not_there", "its-package")
    with pytest.raises(UsageError, match=r"the extra `serve` \(its-package missing\); run `pip install 'evrun\[serve\]'`"):
        config.check_libraries()
