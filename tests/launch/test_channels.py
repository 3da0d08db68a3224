from __future__ import annotations

import mmap
import os

import pytest

from evrun.expert_worker.wire import heartbeat
from evrun.expert_worker.wire.errors import DeviceError
from evrun.launch import channels
from evrun.launch.channels import Channels


def test_what_workers_get_of_the_calls_cannot_be_written() -> None:
    with Channels(1, 8192, 8192, doorbell=False) as made:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(made.call_read_fd, b"x")
        with pytest.raises(PermissionError):
            mmap.mmap(made.call_read_fd, 8192, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        os.pwrite(made.call_fd, b"call", 0)
        with mmap.mmap(made.call_read_fd, 8192, mmap.MAP_SHARED, mmap.PROT_READ) as seen:
            assert seen[:4] == b"call"


def test_memory_is_reserved_and_cannot_be_cut() -> None:
    with Channels(2, 8192, 4096 * 3, doorbell=True) as made:
        for fd, size in [(made.call_fd, 8192), *((fd, 4096 * 3) for fd in made.reply_fds)]:
            assert os.fstat(fd).st_size == size
            assert os.fstat(fd).st_blocks * 512 >= size
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 0)
        assert len({*made.request_bell_fds, *made.reply_bell_fds}) == 4


def test_nothing_is_inherited_by_accident_or_left_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with Channels(2, 8192, 8192, doorbell=True) as made:
        fds = [made.call_fd, made.call_read_fd, made.lifeline_fd, *made.reply_fds, *made.request_bell_fds, *made.reply_bell_fds]
        assert not any(os.get_inheritable(fd) for fd in fds)
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_progress_record_is_read() -> None:
    with Channels(1, 8192, 8192, doorbell=False) as made:
        assert made.beat(0) is None
        with mmap.mmap(made.reply_fds[0], heartbeat.RECORD_BYTES) as memory, memoryview(memory) as view:
            heart = heartbeat.Heart(view, 3, 77)
            heart.begin(5, 1)
            found = made.beat(0)
            del heart  # it holds a view of the memory
        assert found is not None
        assert (found.incarnation, found.pid, found.state, found.layer) == (3, 77, "serving", 5)


def test_too_little_memory_names_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"slot memory: 1048577 MiB needed, \d+ MiB available; lower --prefill-chunk"):
        Channels(1, 4096, 1 << 40, doorbell=False)

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(channels.os, "posix_fallocate", full)
    with pytest.raises(DeviceError, match="slot memory: 1 MiB needed, No space left"):
        Channels(1, 4096, 8192, doorbell=False)
    assert set(os.listdir("/proc/self/fd")) == before
