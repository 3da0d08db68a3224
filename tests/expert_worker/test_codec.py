import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evrun.expert_worker.wire import messages, requests, supervision
from evrun.expert_worker.wire.codec import MAX_BYTES, VERSION, Codec, CodecError
from evrun.expert_worker.wire.messages import Call, Hello, Partial

CODECS = [messages.codec, requests.codec, supervision.codec]
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)
CALL = Call("run", 1, 2, 3, 0, 5, [1, 9], False)


def test_messages_come_back_as_they_were() -> None:
    for message in (CALL, Hello("s", "run", 1, 2, 3), Partial("run", 1, 2, 3, 4, -1, [0, 18800640, 0, 0, 0, 0, 0], 0.25)):
        assert messages.codec.decode(messages.codec.encode(message)) == message


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_one_clear_error(data: bytes) -> None:
    for codec in CODECS:
        with pytest.raises(CodecError):
            codec.decode(data)


@given(st.lists(plain, max_size=14), st.sampled_from(["Call", "Hello", "Partial", "Generate", "Status", "nonsense", 7, None]))
def test_wrong_fields_are_one_clear_error(fields: list[object], kind: object) -> None:
    data = msgpack.packb([VERSION, kind, *fields])
    for codec in CODECS:
        try:
            message = codec.decode(data)
        except CodecError:
            continue
        assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (msgpack.packb([VERSION + 1, "Call"]), "protocol version 1 expected, found 2"),
        (msgpack.packb([VERSION, "Bye"]), "unknown message 'Bye'; known: Call"),
        (msgpack.packb([VERSION, "Call", "run"]), "Call has 8 fields, found 1"),
        (msgpack.packb([VERSION, "Call", "run", 1, 2, 3, 0, 5, ["x"], False]), "Call.experts must be list[int]"),
        (msgpack.packb([VERSION, "Call", "run", True, 2, 3, 0, 5, [1], False]), "Call.incarnation must be int, found bool"),
        (b"\xdd\xff\xff\xff\xff", "not msgpack"),
    ],
)
def test_errors_say_what_was_expected(data: bytes, says: str) -> None:
    with pytest.raises(CodecError, match=says.replace("[", r"\[")):
        messages.codec.decode(data)


def test_a_message_that_is_too_long_is_refused_on_both_sides() -> None:
    with pytest.raises(CodecError, match="at most"):
        messages.codec.encode(Hello("x" * (MAX_BYTES + 1), "run", 0, 1, 1))
    with pytest.raises(CodecError, match="at most"):
        messages.codec.decode(b"\x93" + b"\x00" * MAX_BYTES + b"\x00" * 16)


def test_a_pickle_is_not_a_message() -> None:
    import pickle

    with pytest.raises(CodecError):
        messages.codec.decode(pickle.dumps(CALL))


def test_two_messages_of_one_name_are_refused() -> None:
    codec = Codec("test")
    codec.register(Call)
    with pytest.raises(AssertionError):
        codec.register(Call)
