"""`--combine exact`: the same bytes for every world, deal, transport and order of replies."""

import json
from pathlib import Path

import pytest
from runs import GOLDEN, Evrun, prompts, running

PROMPT = next(p for p in prompts("full") if p["name"] == "mixed")
FULL = GOLDEN / "full" / "checkpoint"


def logits_file(evrun: Evrun, world: int, *args: str) -> bytes:
    with running(evrun, FULL, "--combine", "exact", *args, world=world):
        return evrun.dumped(PROMPT["ids"])[3]


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    from runs import evrun_in

    with evrun_in(tmp_path_factory.mktemp("e")) as evrun:
        return logits_file(evrun, 1)


@pytest.mark.parametrize(
    ("world", "args"),
    [
        pytest.param(2, (), marks=pytest.mark.slow, id="2-sorted"),
        pytest.param(3, ("--deal", "home"), id="3-home"),
        pytest.param(4, ("--transport", "zmq"), marks=pytest.mark.slow, id="4-zmq"),
        pytest.param(7, (), marks=pytest.mark.slow, id="7-sorted"),
    ],
)
def test_bytes_do_not_depend_on_the_world(evrun: Evrun, one_worker: bytes, world: int, args: tuple[str, ...]) -> None:
    assert logits_file(evrun, world, *args) == one_worker


@pytest.mark.slow
def test_bytes_do_not_depend_on_who_answers_first(evrun: Evrun, one_worker: bytes, tmp_path: Path) -> None:
    script = tmp_path / "faults.json"
    script.write_text(json.dumps([{"rank": rank, "at": "write", "do": "delay", "ms": 4} for rank in range(4)]))
    assert logits_file(evrun, 4, "--faults", str(script)) == one_worker
