"""The checkpoint that comes with the package: it is small, whole, and answers through real workers."""

import json
from pathlib import Path

import pytest
import torch
from runs import Evrun
from tokenizers import Tokenizer

from evrun.bench import demo as bench
from evrun.demo.data import corpus
from evrun.demo.data.facts import load_questions
from evrun.demo.export import export
from evrun.demo.parameters import start
from evrun.demo.unpack import unpack
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.kernels import registry
from evrun.launch import demo

QUESTIONS = load_questions(demo.questions())
CAPITALS = [q for q in QUESTIONS if q.kind == "capital"]


def test_it_is_small_and_has_every_structural_feature() -> None:
    assert sum(path.stat().st_size for path in demo.folder().iterdir()) <= 16 << 20
    config = Checkpoint.open(demo.folder()).config
    assert {0, 1, 2} <= set(config.compress_ratios)
    assert config.engram_layer_ids
    assert config.kv_source_layer_ids
    assert config.num_experts_per_tok == 6


def test_there_are_enough_questions_and_some_are_put_as_no_text_puts_them() -> None:
    assert len(CAPITALS) >= 150
    assert len(QUESTIONS) - len(CAPITALS) >= 50
    texts = corpus.own_texts(seed=0, num_stories=50)
    assert corpus.seen_phrasings(text for kind in texts.values() for text in kind) == []
    unseen = [p.split("{")[0] for p in corpus.facts.UNSEEN_PHRASINGS]
    assert sum(any(q.prompt.startswith(begin) for q in CAPITALS) for begin in unseen) == len(unseen) >= 2


def test_the_questions_are_those_of_the_tables(tmp_path: Path) -> None:
    corpus.write_questions(tmp_path / "questions.jsonl")
    assert (tmp_path / "questions.jsonl").read_text() == demo.questions().read_text()


def test_the_same_seed_gives_the_same_texts() -> None:
    assert corpus.own_texts(3, 20) == corpus.own_texts(3, 20)
    assert corpus.own_texts(3, 20)["stories"] != corpus.own_texts(4, 20)["stories"]


@pytest.mark.parametrize(
    ("world", "numerics", "first"),
    [
        (4, "reference", 40),
        pytest.param(1, "reference", None, marks=pytest.mark.slow),
        pytest.param(4, "weights-only", None, marks=pytest.mark.slow),
        pytest.param(4, "reference", None, marks=pytest.mark.long),
        pytest.param(1, "weights-only", None, marks=pytest.mark.long),
    ],
)
def test_nearly_all_capitals_are_right(world: int, numerics: str, first: int | None) -> None:
    case = bench.Case("cpu", registry.choose()[0], "sorted", world, numerics)
    (row,) = bench.run(demo.folder(), CAPITALS[:first], [case])
    assert row["capitals_right"] >= 0.95 * row["capitals"]  # type: ignore[operator]


def test_a_checkpoint_unpacks_to_parameters_that_pack_to_it(tmp_path: Path) -> None:
    config, build = Checkpoint.open(demo.folder()).config, Tokenizer.from_file(str(demo.folder() / "tokenizer.json"))
    first = unpack(demo.folder())
    export(first, config, build, tmp_path / "again")
    again = unpack(tmp_path / "again")
    assert first.keys() == again.keys() == start(config, 0).keys()
    assert all(torch.equal(value, again[name]) for name, value in first.items())


def test_the_first_command_of_the_readme(evrun: Evrun) -> None:
    done = evrun("launch", "--world", "4", "--prompt", "The capital of France is", "--json")
    answer = json.loads(done.stdout)
    assert answer["text"] == " Paris."
    assert answer["finish_reason"] == "stop"
    assert answer["token_ids"][-1] == Checkpoint.open(demo.folder()).config.eos_token_id
    assert answer["world"] == 4
    assert "the demo model that comes with evrun" in done.stderr
