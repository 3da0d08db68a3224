import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evrun.expert_worker.loop import MAX_CAUSE
from evrun.expert_worker.wire import cell_codec, heartbeat
from evrun.expert_worker.wire.codec import CodecError
from evrun.expert_worker.wire.errors import DeviceError
from evrun.expert_worker.wire.messages import COUNTERS, Call, Failed, Partial, codec
from evrun.expert_worker.wire.slots import SLOTS, CallMemory, ReplyMemory, SlotLayout

RELEASE = SlotLayout(world_size=4, tokens=512, hidden=5120, top_k=6, itemsize=2, exact=False, num_experts=384)


def memory(size: int) -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    return fd


def test_a_reply_for_one_token_is_20_kib() -> None:
    fd = memory(RELEASE.reply_bytes)
    assert ReplyMemory(RELEASE, fd, writable=True).partial(1).nbytes == 20 << 10
    os.close(fd)


@given(
    st.integers(1, 9), st.integers(1, 64), st.sampled_from([32, 96, 160]), st.integers(1, 8), st.sampled_from([2, 4]), st.booleans(),
    st.integers(1, 2000),
)  # fmt: skip
def test_views_never_overlap(world: int, tokens: int, hidden: int, top_k: int, itemsize: int, exact: bool, experts: int) -> None:
    layout = SlotLayout(world, tokens, hidden, top_k, itemsize, exact, experts)
    calls_fd, reply_fd = memory(layout.call_bytes), memory(layout.reply_bytes)
    calls, reply = CallMemory(layout, calls_fd, writable=True), ReplyMemory(layout, reply_fd, writable=True)
    for rank in range(world):
        calls.cell(rank).write(bytes([rank]) * (layout.cell_bytes - 16))
    for slot in range(SLOTS):
        calls.x(slot, tokens)[:] = slot + 1
        calls.ids(slot, tokens)[:] = slot + 2
        calls.weights(slot, tokens)[:] = slot + 3
    for slot in range(SLOTS):
        assert (calls.x(slot, tokens) == slot + 1).all()
        assert (calls.ids(slot, tokens) == slot + 2).all()
        assert (calls.weights(slot, tokens) == slot + 3).all()
    for rank in range(world):
        assert calls.cell(rank).read() == bytes([rank]) * (layout.cell_bytes - 16)
    heart = heartbeat.Heart(reply.record, 3, 4)
    reply.cell.write(b"x" * (layout.cell_bytes - 16))
    if exact:
        reply.rows(tokens * top_k)[:] = 7
    else:
        reply.partial(tokens)[:] = 7
    heart.begin(5, 6)
    beat = heartbeat.read(reply.record)
    assert beat is not None
    assert (beat.incarnation, beat.layer, beat.sequence, beat.state) == (3, 5, 6, "serving")
    assert reply.cell.read() == b"x" * (layout.cell_bytes - 16)
    os.close(calls_fd)
    os.close(reply_fd)


@given(st.integers(1, 3000))
def test_the_longest_messages_fit_a_cell(experts: int) -> None:
    layout = SlotLayout(1, 1, 32, 1, 2, False, experts)
    big = 2**62
    for encode in (codec.encode, cell_codec.encode):
        assert len(encode(Call("r" * 32, big, big, big, 1, big, list(range(experts)), True))) <= layout.cell_bytes - 16
        assert len(encode(Partial("r" * 32, big, big, big, big, big, [big] * len(COUNTERS), 0.1))) <= layout.cell_bytes - 16
        assert len(encode(Failed("r" * 32, big, big, big, "\U0001f600" * (MAX_CAUSE // 4)))) <= layout.cell_bytes - 16


integers = st.integers(-(2**63), 2**63 - 1)


@given(st.tuples(integers, integers, integers, integers, integers), st.lists(st.integers(0, 2**31 - 1), max_size=9), st.booleans())
def test_cells_carry_messages_unchanged(n: tuple[int, ...], experts: list[int], checksum: bool) -> None:
    for message in (
        Call("run", *n, experts, checksum), Partial("run", *n, [*n, 1, 2], 0.5), Failed("run", *n[:3], "cause ‘x’"),
    ):  # fmt: skip
        assert cell_codec.decode(cell_codec.encode(message), "run") == message


@given(st.binary(max_size=120))
def test_any_bytes_of_a_cell_are_a_message_or_one_clear_error(data: bytes) -> None:
    with pytest.raises(CodecError, match="cell"):
        cell_codec.decode(data, "run")


def test_a_cell_with_an_impossible_length_reads_as_no_message() -> None:
    fd = memory(RELEASE.reply_bytes)
    reply = ReplyMemory(RELEASE, fd, writable=True)
    for length in (-1, 1 << 40):
        reply.memory[heartbeat.RECORD_BYTES + 8 : heartbeat.RECORD_BYTES + 16] = length.to_bytes(8, "little", signed=True)
        assert reply.cell.read() == b""
    os.close(fd)


def test_memory_shorter_than_the_layout_is_refused() -> None:
    fd = memory(RELEASE.call_bytes - 1)
    with pytest.raises(DeviceError, match=f"expected {RELEASE.call_bytes} bytes, found {RELEASE.call_bytes - 1}"):
        CallMemory(RELEASE, fd, writable=False)
    os.close(fd)


def test_a_worker_cannot_write_the_calls() -> None:
    fd = memory(RELEASE.call_bytes)
    calls = CallMemory(RELEASE, fd, writable=False)
    with pytest.raises(ValueError, match="read-only"):
        calls.x(0, 1)[:] = 1
    os.close(fd)


def test_no_beat_before_the_first() -> None:
    assert heartbeat.read(memoryview(bytearray(4096))) is None


def test_a_reader_beside_the_writer_never_sees_a_turn_go_back() -> None:
    """A turn that flickers while it is written would hand out an old message as a new one."""
    layout = SlotLayout(1, 1, 32, 1, 2, False, 8)
    fd = memory(layout.reply_bytes)
    reply = ReplyMemory(layout, fd, writable=True)
    child = os.fork()
    if child == 0:
        heart = heartbeat.Heart(reply.record, 1, 2)
        for _ in range(60_000):
            reply.cell.write(b"x" * 100)
            heart.beat()
        os._exit(0)
    last, last_at, ended = 0, 0.0, False
    while not ended:
        ended = os.waitpid(child, os.WNOHANG)[0] == child
        for _ in range(200):
            turn = reply.cell.turn()
            assert turn >= last, (turn, last)
            last = turn
            beat = heartbeat.read(reply.record)
            if beat is not None:
                assert beat.at_s >= last_at
                last_at = beat.at_s
    assert last == 60_000
    os.close(fd)
