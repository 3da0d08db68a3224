import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evrun.coordinator.text import GrowingText, Text

GOLDEN = Path(__file__).parents[1] / "golden"
VOCAB = 512


@pytest.fixture(scope="module")
def text() -> Text:
    return Text(GOLDEN / "full" / "checkpoint", bos_token_id=0)


TEXT = Text(GOLDEN / "full" / "checkpoint", bos_token_id=0)


def test_golden_prompts_encode_to_their_ids() -> None:
    seen = 0
    for config in ("minimal", "full", "long"):
        own = Text(GOLDEN / config / "checkpoint", bos_token_id=0)
        for prompt in json.loads((GOLDEN / config / "prompts.json").read_text()):
            if "text" in prompt:
                assert own.encode(prompt["text"], add_bos=False) == prompt["ids"]
                seen += 1
    assert seen >= 3


def test_exactly_one_bos() -> None:
    bos = TEXT.piece(0)
    assert TEXT.encode("a", add_bos=True)[0] == 0
    assert TEXT.encode("a", add_bos=True).count(0) == 1
    assert TEXT.encode(bos + "a", add_bos=True).count(0) == 1
    assert TEXT.encode("a", add_bos=False).count(0) == 0


@given(st.lists(st.integers(0, VOCAB - 1), max_size=40))
def test_pieces_concatenate_to_the_whole_text(ids: list[int]) -> None:
    growing = GrowingText(TEXT, [])
    given_out = "".join(growing.add(i) for i in ids) + growing.finish()
    assert given_out == growing.whole == TEXT.decode(ids)


@given(st.text(max_size=30))
def test_no_character_is_split(sample: str) -> None:
    growing = GrowingText(TEXT, [])
    pieces = [growing.add(i) for i in TEXT.encode(sample, add_bos=False)] + [growing.finish()]
    if "�" not in sample:
        assert not any("�" in p for p in pieces)
    assert "".join(pieces) == TEXT.decode(TEXT.encode(sample, add_bos=False))


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_nothing_of_a_stop_string_is_given_out(sample: str, stop: list[str]) -> None:
    growing = GrowingText(TEXT, stop)
    out = ""
    for i in TEXT.encode(sample, add_bos=False):
        out += growing.add(i)
        if growing.stopped_on is not None:
            break
    out += growing.finish()
    ends = [sample.find(s) for s in stop if s in sample]
    if growing.stopped_on is None:
        assert out == sample
        assert not ends
    else:
        assert not any(s in out for s in stop)
        assert sample.startswith(out + growing.stopped_on)
