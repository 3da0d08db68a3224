"""The official client and curl against real processes."""

from __future__ import annotations

import json
import subprocess
import threading
from typing import Any

import openai
import pytest
from runs import prompts
from served import MODEL, Served, events, until

CHAT = next(p for p in prompts("full") if p["name"] == "chat")["ids"]
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}
]


def test_a_completion_is_generates_answer(served: Served) -> None:
    mine = served.evrun.generate(CHAT, new=24)
    found = served.openai.completions.create(model=MODEL, prompt=CHAT, max_tokens=24, **GREEDY)
    choice = found.choices[0]
    assert (choice.text, choice.finish_reason) == (mine["text"], "length")
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == mine["token_ids"]
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (len(CHAT), 24, len(CHAT) + 24)


def test_streamed_pieces_make_the_text(served: Served) -> None:
    whole = served.complete(CHAT, 24)
    options: dict[str, Any] = {"include_usage": True}
    pieces = list(served.openai.completions.create(model=MODEL, prompt=CHAT, max_tokens=24, stream=True, stream_options=options, **GREEDY))
    *texts, usage = pieces
    assert "".join(piece.choices[0].text for piece in texts) == whole["choices"][0]["text"]
    assert [i for piece in texts for i in (piece.choices[0].model_extra or {})["token_ids"]] == whole["choices"][0]["token_ids"]
    assert texts[-1].choices[0].finish_reason == "length"
    assert all(piece.usage is None for piece in texts)
    assert (usage.choices, usage.usage and usage.usage.completion_tokens) == ([], 24)
    assert len({piece.id for piece in pieces}) == 1


def test_nothing_of_a_stop_string_is_sent(served: Served) -> None:
    text = served.complete(CHAT, 24)["choices"][0]["text"]
    stop = next(text[i : i + 3] for i in range(4, len(text)) if text[i : i + 3].isprintable() and "\ufffd" not in text[i : i + 3])
    with served.stream(prompt=CHAT, max_tokens=24, temperature=0, ignore_eos=True, stop=["never", stop], logprobs=0) as response:
        chunks = list(events(response))
    assert "".join(c["choices"][0]["text"] for c in chunks) == text[: text.index(stop)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    pieces = [p for c in chunks for p in c["choices"][0]["logprobs"]["tokens"]]
    assert len("".join(pieces)) <= text.index(stop)


def test_text_gets_exactly_one_bos(served: Served) -> None:
    plain = served.post(prompt="abc", max_tokens=1, return_token_ids=True).json()["choices"][0]["prompt_token_ids"]
    assert plain.count(0) == 1
    again = served.post(prompt="<｜begin▁of▁sentence｜>abc", max_tokens=1, return_token_ids=True).json()["choices"][0]["prompt_token_ids"]
    assert again == plain
    mine = json.loads(served.evrun("generate", "--prompt", "abc", "--max-new-tokens", "1", "--json").stdout)
    assert plain == mine["prompt_ids"]


def test_logprobs_are_of_the_tokens(served: Served) -> None:
    choice = served.complete(CHAT, 3, logprobs=2)["choices"][0]
    found = choice["logprobs"]
    assert [len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [3, 3, 3, 3]
    for piece, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert value < 0
        assert max(top, key=top.get) == piece  # greedy
        assert top[piece] == value


def test_a_seed_and_top_p_decide_the_sample(served: Served) -> None:
    def sample(**fields: Any) -> list[int]:
        ids: list[int] = served.complete([0, 3], 10, temperature=1, **fields)["choices"][0]["token_ids"]
        return ids

    assert sample(seed=1) == sample(seed=1) != sample(seed=2)
    greedy = served.complete([0, 3], 10)["choices"][0]["token_ids"]
    assert sample(seed=1, top_p=1e-9) == greedy


def test_chat_streams_what_it_answers(served: Served) -> None:
    whole = served.openai.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, logprobs=True, top_logprobs=2, **GREEDY)
    message = whole.choices[0].message
    assert message.model_extra is not None
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    prompt_ids = (whole.choices[0].model_extra or {})["prompt_token_ids"]
    assert prompt_ids.count(0) == 1
    assert served.complete(prompt_ids, 12)["choices"][0]["token_ids"] == (whole.choices[0].model_extra or {})["token_ids"]
    stream = served.openai.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, stream=True, **GREEDY)
    content, thought, reasons = "", "", []
    for piece in stream:
        delta = piece.choices[0].delta
        content += delta.content or ""
        thought += (delta.model_extra or {}).get("reasoning_content") or ""
        reasons.append(piece.choices[0].finish_reason)
        assert piece.usage is None
    assert content == (message.content or "")
    assert thought == (message.model_extra.get("reasoning_content") or "")
    assert reasons[-1] == whole.choices[0].finish_reason
    assert not any(reasons[:-1])


def test_effort_numbers_and_none(served: Served) -> None:
    def ids(effort: Any, most: int = 2) -> list[int]:
        body = served.post(
            "/v1/chat/completions", messages=HELLO, max_tokens=most, reasoning_effort=effort, return_token_ids=True, temperature=0
        )
        assert body.status_code == 200, body.text
        answer = body.json()
        assert answer["usage"]["completion_tokens"] <= most
        if effort != "none":
            assert 1 <= answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= most
        assert answer["choices"][0]["finish_reason"] in ("length", "stop")
        found: list[int] = answer["choices"][0]["prompt_token_ids"]
        return found

    assert ids(75) == ids("high") == ids(None, 16)
    assert ids(50) == ids("low")
    assert len({tuple(ids(effort)) for effort in (1, 100, 75, "none")}) == 4
    assert ids(100) == ids("max")
    for wrong in (0, 101, True, 3.5, "huge"):
        refused = served.post("/v1/chat/completions", messages=HELLO, reasoning_effort=wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reasoning_effort")


def test_a_tool_loop_with_and_without_its_reasoning(served: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
    for extra in ({}, {"reasoning_content": "I call f."}):
        messages: list[Any] = [
            *HELLO,
            {"role": "assistant", "content": "", "tool_calls": [call], **extra},
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
        ]
        found = served.openai.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=2, temperature=0)
        assert found.usage is not None
        assert found.usage.completion_tokens in (1, 2)


def test_curl(served: Served) -> None:
    body = json.dumps({"model": MODEL, "prompt": CHAT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "stream": True})
    out = subprocess.run(
        ["curl", "-sN", f"{served.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body],
        capture_output=True,
        timeout=60,
        check=True,
    ).stdout
    lines = [line for line in out.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
    assert text == served.complete(CHAT, 6)["choices"][0]["text"]


def test_models_status_and_metrics(served: Served) -> None:
    assert [model.id for model in served.openai.models.list()] == [MODEL]
    assert served.openai.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        served.openai.models.retrieve("other")
    status = served.http.get("/v1/status").json()
    ps = served.evrun.ps()
    assert status.keys() == ps.keys()
    assert [(p["role"], p["rank"], p["pid"]) for p in status["processes"]] == [(p["role"], p["rank"], p["pid"]) for p in ps["processes"]]
    before = {
        name: served.metric(name)
        for name in (
            "evrun_prompt_tokens_total",
            "evrun_generated_tokens_total",
            "evrun_time_to_first_token_seconds_count",
            "evrun_time_per_output_token_seconds_count",
        )
    }
    served.complete(CHAT, 5)
    after = {name: served.metric(name) for name in before}
    assert [after[name] - before[name] for name in before] == [len(CHAT), 5, 1, 1]
    for name in (
        "evrun_requests_running",
        "evrun_requests_waiting",
        "evrun_resends_total",
        "evrun_restarts_total",
        "evrun_dropped_replies_total",
        "evrun_rank_state",
        "evrun_rank_rung",
        "evrun_row_bytes_total",
    ):
        assert f"\n{name}" in served.http.get("/metrics").text, name


def test_health_shows_progress(served: Served) -> None:
    served.complete(CHAT, 2)
    status, body = served.health()
    assert (status, body["status"], body["ranks"]) == (200, "ok", {"serving": 2, "asked": 2})
    assert body["last_layer_age_s"] >= 0
    assert "degraded" not in body


def test_parallel_requests_equal_serial_ones(served: Served) -> None:
    asked = [[0, 3, i] for i in range(20, 26)]
    serial = [served.complete(ids, 6)["choices"][0]["token_ids"] for ids in asked]
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: served.complete(asked[i], 6)["choices"][0]["token_ids"]}))
        for i in range(len(asked))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(asked))] == serial


def test_a_client_that_leaves_frees_its_place(served: Served) -> None:
    with served.stream(prompt=CHAT, max_tokens=150, temperature=0, ignore_eos=True) as response:
        stream = events(response)  # kept: httpx closes with its iterator
        next(stream)
        assert not served.idle()
    until(served.idle, "the place of a client that left", 10)
    assert served.complete(CHAT, 1)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("length", [127, 128, 129])
def test_lengths_at_the_edge_of_a_block(served: Served, length: int) -> None:
    ids = [0, *([3, 17, 60, 61] * 32)][:length]
    mine = served.evrun.generate(ids, new=3)
    assert served.complete(ids, 3)["choices"][0]["token_ids"] == mine["token_ids"]


def test_a_prompt_after_a_similar_one_starts_anew(served: Served) -> None:
    long = [0, *range(20, 70)]
    fresh = served.complete([*long[:30], 90, 91], 4)["choices"][0]["token_ids"]
    served.complete(long, 4)
    assert served.complete([*long[:30], 90, 91], 4)["choices"][0]["token_ids"] == fresh
