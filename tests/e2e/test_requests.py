"""Requests as a user makes them: text, stops, sampling, chunks, bad input."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from runs import GOLDEN, Evrun, evrun_in, expected, prompts, running

FULL = GOLDEN / "full" / "checkpoint"
CHAT = next(p for p in prompts("full") if p["name"] == "chat")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """One run for all tests of this file: float32, weights as stored, chunks of 7."""
    with evrun_in(tmp_path_factory.mktemp("e")) as evrun:
        options = ("--dtype", "float32", "--numerics", "weights-only", "--prefill-chunk", "7", "--max-context", "200")
        with running(evrun, FULL, *options, world=2):
            yield evrun


@pytest.mark.parametrize("prompt", prompts("full"), ids=lambda p: p["name"])
def test_chunks_that_end_anywhere_equal_one_piece(served: Evrun, prompt: dict) -> None:
    want = expected("full", "fp32noaq", prompt["name"])
    _, logits, _, _ = served.dumped(prompt["ids"])
    difference = np.abs(logits - np.concatenate([want["logits"], want["greedy_logits"]])).max(1)
    first = 31 if prompt["name"] == "mixed" else len(difference)  # golden/README: one window value flips in some chunkings
    assert difference[:first].max() <= 1e-3
    assert difference.max() <= 0.2


def test_text_gets_exactly_one_bos(served: Evrun) -> None:
    text = next(p for p in prompts("full") if "text" in p)
    plain = json.loads(served("generate", "--prompt", "abc", "--max-new-tokens", "1", "--json").stdout)["prompt_ids"]
    assert plain[0] == 0
    assert plain.count(0) == 1
    bare = json.loads(served("generate", "--prompt", "abc", "--no-bos", "--max-new-tokens", "1", "--json").stdout)["prompt_ids"]
    assert bare == plain[1:]
    again = json.loads(served("generate", "--prompt", text["text"], "--max-new-tokens", "1", "--json").stdout)["prompt_ids"]
    assert again == text["ids"] or again == [0, *text["ids"]]
    assert again.count(0) == 1


def test_the_streamed_text_is_the_answers_text(served: Evrun) -> None:
    args = ("--prompt-ids", ",".join(map(str, CHAT["ids"])), "--max-new-tokens", "24", "--temperature", "0", "--ignore-eos")
    whole = json.loads(served("generate", *args, "--json").stdout)["text"]
    assert served("generate", *args).stdout.rstrip("\n") == whole.rstrip("\n")


def test_a_stop_string_ends_the_text_before_it(served: Evrun) -> None:
    args = ("--prompt-ids", ",".join(map(str, CHAT["ids"])), "--max-new-tokens", "24", "--temperature", "0", "--ignore-eos", "--json")
    whole = json.loads(served("generate", *args).stdout)
    stop = next(c for c in whole["text"][3:] if c.isalpha())
    cut = json.loads(served("generate", *args, "--stop", stop).stdout)
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop"
    assert len(cut["token_ids"]) < len(whole["token_ids"])


def test_a_seed_decides_the_sample(served: Evrun) -> None:
    def sample(seed: int) -> list[int]:
        out = served("generate", "--prompt-ids", "0,3", "--max-new-tokens", "12", "--temperature", "1", "--seed", str(seed), "--ignore-eos",
                     "--json")  # fmt: skip
        ids: list[int] = json.loads(out.stdout)["token_ids"]
        return ids

    assert sample(1) == sample(1) != sample(2)


def test_top_logits_and_the_object_of_the_contract(served: Evrun) -> None:
    answer = served.generate(CHAT["ids"], "--top-logits", "5", new=3)
    for key in ("prompt_ids", "token_ids", "text", "finish_reason", "error", "world", "workers", "deal", "combine", "numerics", "dtype",
                "seconds", "tokens_per_second", "resends", "top_logits"):  # fmt: skip
        assert key in answer, key
    assert [row[0][0] for row in answer["top_logits"]] == answer["token_ids"]
    assert all(len(row) == 5 and [v for *_, v in row] == sorted((v for *_, v in row), reverse=True) for row in answer["top_logits"])
    assert answer["workers"][0].keys() >= {"rank", "device", "backend", "incarnation", "restarts"}


def test_two_requests_of_different_length_are_as_in_fresh_processes(served: Evrun) -> None:
    first = served.dumped(CHAT["ids"], new=4).logits_file
    served.dumped([0, 3, 17, 60, 61], new=9)
    assert served.dumped(CHAT["ids"], new=4).logits_file == first


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--prompt", ""], "empty"),
        (["--prompt-ids", "0,512"], "511"),
        (["--prompt-ids", "0,-1"], "-1"),
        (["--prompt-ids", "0,x"], "x"),
        (["--prompt-ids", "0", "--max-new-tokens", "0"], "0"),
        (["--prompt-ids", "0", "--max-new-tokens", "-3"], "-3"),
        (["--prompt-ids", "0", "--temperature", "-0.5"], "-0.5"),
        (["--prompt-ids", "0", "--temperature", "nan"], "nan"),
        (["--prompt-ids", ",".join(["3"] * 150), "--max-new-tokens", "51"], "201"),
        (["--prompt-ids", "0", "--stop", ""], "stop"),
        (["--prompt-ids", "0", "--dump-logits", "/nowhere/at/all.safetensors"], "/nowhere"),
    ],
    ids=lambda v: " ".join(v)[:40] if isinstance(v, list) else "",
)
def test_bad_requests_are_one_line_and_exit_2(served: Evrun, args: list[str], says: str) -> None:
    done = served("generate", *args, code=2)
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("evrun: ")]
    assert len(lines) == 1
    assert says in lines[0]
    assert len(served.generate([0, 3], new=1)["token_ids"]) == 1


def test_eos_as_the_first_token_is_an_empty_completion(evrun: Evrun, tmp_path: Path) -> None:
    first = int(expected("full", "bf16", CHAT["name"])["greedy_ids"][0])
    copy = tmp_path / "copy"
    shutil.copytree(FULL, copy)
    config = json.loads((copy / "config.json").read_text())
    config["eos_token_id"] = first  # what this prompt is answered with first
    (copy / "config.json").write_text(json.dumps(config))
    done = evrun("launch", "--checkpoint", str(copy), "--world", "1", "--device", "cpu", "--prompt-ids", ",".join(map(str, CHAT["ids"])),
                 "--temperature", "0", "--json")  # fmt: skip
    answer = json.loads(done.stdout)
    assert (answer["text"], answer["finish_reason"], answer["token_ids"]) == ("", "stop", [first])
    assert answer["tokens_per_second"]["decode"] in (None, 0)
    evrun.assert_nothing_left()


def test_a_full_disk_under_a_dump_is_said_and_the_run_goes_on(served: Evrun) -> None:
    target = Path("/dev/full")
    done = served("generate", "--prompt-ids", "0", "--max-new-tokens", "1", "--dump-logits", str(target / "x"), code=2)
    assert "/dev/full" in done.stderr
    assert len(served.generate([0, 3], new=1)["token_ids"]) == 1
