"""The header parser is total: whatever the bytes, it gives sound tensors or problems, never both, never an exception."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evrun.expert_worker.wire.checkpoint.dtypes import ITEM_BYTES
from evrun.expert_worker.wire.checkpoint.header import MAX_HEADER_BYTES, Header, _walk, header_bytes, parse

SOUND = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [24, 28]},
    "empty": {"dtype": "BF16", "shape": [0, 7], "data_offsets": [28, 28]},
    "c": {"dtype": "I8", "shape": [2, 2], "data_offsets": [28, 32]},
}
DATA_BYTES = 32


def encode(document) -> tuple[bytes, int]:
    text = json.dumps(document).encode()
    return text, 8 + len(text) + DATA_BYTES


def check(header: Header, file_bytes: int) -> None:
    """What `parse` promises of its answer."""
    assert all("\n" not in line and line.isprintable() for line in header.problems)
    if header.problems:
        assert header.names == []
        return
    room = file_bytes - header.data_start
    assert len(header.names) == len(header.starts) == len(header.ends) == len(header.kind_of)
    covered = np.zeros(room, int)
    for kind, start, end in zip(header.kind_of, header.starts, header.ends, strict=True):
        dtype, shape = header.kinds[kind]
        assert 0 <= start <= end <= room
        assert end - start == ITEM_BYTES[dtype] * int(np.prod(shape, dtype=object))
        covered[start:end] += 1
    used = int(header.ends.max(initial=0))
    assert (covered[:used] == 1).all()
    assert bool(header.warnings) == (used < room)


def test_sound() -> None:
    text, file_bytes = encode(SOUND)
    header = parse(text, file_bytes)
    check(header, file_bytes)
    assert header.problems == header.warnings == []
    assert header.names == ["a", "b", "empty", "c"]
    assert header.kinds[header.kind_of[0]] == ("F32", (2, 3))
    assert header.starts.tolist() == [0, 24, 28, 28]


def test_order_of_names_is_free() -> None:
    text, file_bytes = encode(dict(reversed(SOUND.items())))
    assert parse(text, file_bytes).problems == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda d: d["a"].update(dtype="F4_E9"), "a: unknown dtype 'F4_E9'; known: BOOL"),
        (lambda d: d["a"].update(dtype=7), "unknown dtype 7"),
        (lambda d: d["a"].update(dtype=["F32"]), "a:"),
        (lambda d: d["a"].update(shape=[3, 3]), "a: F32 [3, 3] takes 36 bytes, data_offsets [0, 24] hold 24"),
        (lambda d: d["a"].update(shape=[-2, -3]), "non-negative integers"),
        (lambda d: d["a"].update(shape=[2.5]), "non-negative integers"),
        (lambda d: d["a"].update(shape=[[6]]), "a: "),
        (lambda d: d["a"].update(shape=None), "a: expected dtype, shape"),
        (lambda d: d["a"].update(shape=[1] * 9), "at most 8"),
        (lambda d: d["a"].update(shape=[1 << 61, 1 << 61, 8]), "a: F32"),
        (lambda d: d["a"].update(data_offsets=[-4, 20]), "a: expected data_offsets 0 <= start <= end"),
        (lambda d: d["a"].update(data_offsets=[24, 0]), "a: expected data_offsets"),
        (lambda d: d["a"].update(data_offsets=[0, 24, 24]), "a: expected dtype, shape and two data_offsets"),
        (lambda d: d["a"].update(data_offsets=[0.0, 24]), "a: expected data_offsets"),
        (lambda d: d["a"].update(data_offsets=[False, 24]), "a: expected data_offsets"),
        (lambda d: d["a"].pop("data_offsets") and None, "a: expected dtype"),
        (lambda d: d.update(a="text"), "a: expected dtype"),
        (lambda d: d.update(a=None), "a: expected dtype"),
        (lambda d: d["c"].update(data_offsets=[1 << 70, (1 << 70) + 4]), "1 tensors reach beyond the end, first c"),
        (lambda d: d["c"].update(data_offsets=[30, 34]), "truncated: expected"),
        (lambda d: d["b"].update(data_offsets=[20, 24]), "overlap"),
        (lambda d: d.pop("b") and None, "leave a hole of 4 bytes after a"),
        (lambda d: [], "expected a JSON object as header, found list"),
        (lambda d: {"x\ud800\n": 3}, "x\\ud800\\n"),
    ],
)
def test_lies(change, word: str) -> None:
    document = json.loads(json.dumps(SOUND))
    changed = change(document)
    document = document if changed is None else changed
    text, file_bytes = encode(document)
    header = parse(text, file_bytes)
    check(header, file_bytes)
    assert word in "\n".join(header.problems)


def test_all_problems_of_a_header_are_listed() -> None:
    document = json.loads(json.dumps(SOUND))
    document["a"]["dtype"] = "X"
    document["b"]["shape"] = [5]
    document["c"]["data_offsets"] = [28, 40]
    header = parse(*encode(document))
    assert [line.split(":")[0] for line in header.problems] == ["a", "b", "c"]


def test_bytes_after_the_last_tensor_are_a_warning() -> None:
    text, file_bytes = encode(SOUND)
    header = parse(text, file_bytes + 4096)
    assert header.problems == []
    assert "4096 bytes after the last tensor" in header.warnings[0]


@pytest.mark.parametrize("text", [b"", b"{", b"null", b"3", b"\xff\xfe", b"{}x", b"[" * 100_000, b'{"a":' + b"9" * 5000 + b"}"])
def test_no_header(text: bytes) -> None:
    header = parse(text, 8 + len(text))
    check(header, 8 + len(text))
    assert header.problems


def test_no_tensor_at_all_is_a_sound_header() -> None:
    assert parse(b"{}", 10).problems == []


@pytest.mark.parametrize(
    ("prefix", "file_bytes", "word"),
    [
        (b"", 0, "found 0 bytes"),
        (b"1234567", 7, "found 7 bytes"),
        ((100).to_bytes(8, "little"), 107, "expected at least 108 bytes for the header alone, found a file of 107"),
        ((1 << 63).to_bytes(8, "little"), 1000, f"at most {MAX_HEADER_BYTES}"),
    ],
)
def test_length_field(prefix: bytes, file_bytes: int, word: str) -> None:
    length, wrong = header_bytes(prefix, file_bytes)
    assert length == 0
    assert word in wrong


scalars = st.none() | st.booleans() | st.integers(-5, 40) | st.integers() | st.floats() | st.text(max_size=3)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "I8", "BF16", "F8_E8M0", "Q"]) | scalars,
        "shape": st.lists(st.integers(0, 5), max_size=3) | scalars | st.lists(scalars, max_size=3),
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2) | st.lists(scalars, max_size=3) | scalars,
    }
)
documents = st.dictionaries(st.text(max_size=4), entries | scalars | st.lists(scalars, max_size=2), max_size=5)


@given(documents, st.integers(-20, 60))
def test_any_document(document, spare: int) -> None:
    text = json.dumps(document).encode()
    file_bytes = 8 + len(text) + max(0, spare)
    check(parse(text, file_bytes), file_bytes)


@given(st.binary(max_size=60))
def test_any_bytes(text: bytes) -> None:
    check(parse(text, 8 + len(text)), 8 + len(text))


@given(st.data())
def test_any_flipped_byte(data) -> None:
    text, file_bytes = encode(SOUND)
    at = data.draw(st.integers(0, len(text) - 1))
    flipped = text[:at] + bytes([data.draw(st.integers(0, 255))]) + text[at + 1 :]
    check(parse(flipped, file_bytes), file_bytes)


@given(st.lists(st.tuples(st.sampled_from(["F32", "I8", "BF16"]), st.lists(st.integers(0, 4), max_size=3)), max_size=6), st.randoms())
def test_every_sound_header_is_accepted(tensors, random) -> None:
    document, at = {}, 0
    for i, (dtype, shape) in enumerate(tensors):
        size = ITEM_BYTES[dtype] * int(np.prod(shape, dtype=int))
        document[f"t{i}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    names = list(document)
    random.shuffle(names)
    text = json.dumps({n: document[n] for n in names}).encode()
    header = parse(text, 8 + len(text) + at)
    assert header.problems == header.warnings == []
    check(header, 8 + len(text) + at)
    assert _walk(document, header.data_start, 8 + len(text) + at) == []
