from __future__ import annotations

import dataclasses

from evrun.expert_worker.wire.requests import Finished, Started, Token
from evrun.launch.report import Result, end_line, json_object, prompt_line, tokens_per_second

FINISHED = Finished([7, 8, 1], "ab", "stop", "eos", None, 0, 2.0, 0.3, 0.6, 5, 2, 0)
SETTINGS = {"world": 2, "deal": "sorted", "combine": "exact", "numerics": "reference", "dtype": "float32"}
ROWS = [
    {"role": "coordinator", "rank": None},
    {"role": "worker", "rank": 0, "device": "cpu", "backend": "torch", "incarnation": 2, "restarts": 1, "pid": 7},
]


def test_lines_for_people() -> None:
    assert prompt_line(Started([1, 2], ["The", " end"], "")) == "prompt 2 tokens: ['The', ' end']"
    assert prompt_line(Started([1], ["\n"], "")) == "prompt 1 token: ['\\n']"
    assert prompt_line(Started(list(range(40)), ["x"] * 40, "")).endswith("'x', ... 8 more]")
    assert end_line(FINISHED) == "3 tokens in 0.9 s (prefill 0.30 s, 16.7 tokens/s; decode 0.60 s, 3.3 tokens/s), stopped on eos"
    stopped = dataclasses.replace(FINISHED, token_ids=[7], stopped_on="END", decode_s=0.0, decode_tokens=0, resends=1)
    assert end_line(stopped) == "1 token in 0.3 s (prefill 0.30 s, 16.7 tokens/s; no decode), stopped on 'END', 1 resend"


def test_an_answer_without_decode_has_no_rate() -> None:
    assert tokens_per_second(0, 0.0) is None
    assert tokens_per_second(3, 0.0) is None
    assert tokens_per_second(3, 1.5) == 2.0


def test_an_answer_as_json() -> None:
    result = Result(started=Started([3], ["x"], "r"))
    for token in FINISHED.token_ids:
        result.take(Token(token, "a", [[token, "x", 0.5]]))
    result.finish(FINISHED)
    found = json_object(result, SETTINGS, ROWS, with_top_logits=True)
    assert found["text"] == "ab"
    assert found["top_logits"] == [[[7, "x", 0.5]], [[8, "x", 0.5]], [[1, "x", 0.5]]]
    assert found["workers"] == [{"rank": 0, "device": "cpu", "backend": "torch", "incarnation": 2, "restarts": 1}]
    assert (found["finish_reason"], found["error"]) == ("stop", None)
    assert "top_logits" not in json_object(result, SETTINGS, ROWS, with_top_logits=False)


def test_an_error_as_json_keeps_what_came_before() -> None:
    result = Result(started=Started([3], ["x"], "r"))
    result.take(Token(7, "a", []))
    result.fail(5, "lost")
    found = json_object(result, SETTINGS, ROWS, with_top_logits=False)
    assert (found["token_ids"], found["text"], found["finish_reason"], found["error"]) == ([7], "a", "error", "lost")
    assert found["seconds"] == {"load": None, "prefill": None, "decode": None}
    assert found["tokens_per_second"] == {"prefill": None, "decode": None}


def test_a_request_that_failed_while_running() -> None:
    result = Result()
    result.finish(dataclasses.replace(FINISHED, finish_reason="error", error="E8M0 byte 255 in w1", exit_code=5))
    assert (result.exit_code, result.error) == (5, "E8M0 byte 255 in w1")
    found = json_object(result, SETTINGS, [], with_top_logits=False)
    assert (found["finish_reason"], found["seconds"]["load"]) == ("error", 2.0)
