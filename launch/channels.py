"""The descriptors that the launcher makes once per run and hands to every incarnation: slots, doorbells, lifeline.

All of it is anonymous (memfd, eventfd, pipe): no name in /dev/shm, no container limit of 64 MB on it, and nothing to
clean up after a kill. Memory is reserved up front, so a machine that is short of it says so here, not with a SIGBUS later.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
from typing import Any

from evrun.expert_worker.wire import heartbeat
from evrun.expert_worker.wire.errors import DeviceError
from evrun.expert_worker.wire.heartbeat import Beat
from evrun.launch.devices import available_memory_bytes

MIB = 1 << 20


class Channels:
    """Descriptors of one run, all close-on-exec here. Use as a context manager: leaving closes them.

    world        ranks
    call_bytes, reply_bytes    sizes of the call memory and of each rank's reply memory
    doorbell     whether ranks get eventfds
    Raises DeviceError when the memory is not there (needed, available).
    """

    def __init__(self, world: int, call_bytes: int, reply_bytes: int, doorbell: bool) -> None:
        needed, available = call_bytes + world * reply_bytes, available_memory_bytes()
        if needed > available:
            raise DeviceError(_short_of_memory(needed, f"{available // MIB} MiB available"))
        self._open: list[int] = []
        self._beats: list[mmap.mmap] = []
        try:
            self.call_fd = self._memory("evrun-calls", call_bytes, needed)
            # Workers get a descriptor that cannot write: what one rank reads, no other rank can damage.
            self.call_read_fd = self._keep(os.open(f"/proc/self/fd/{self.call_fd}", os.O_RDONLY | os.O_CLOEXEC))
            self.reply_fds = [self._memory(f"evrun-reply-{rank}", reply_bytes, needed) for rank in range(world)]
            self._beats = [mmap.mmap(fd, heartbeat.RECORD_BYTES, mmap.MAP_SHARED, mmap.PROT_READ) for fd in self.reply_fds]
            self.request_bell_fds = [self._bell() if doorbell else -1 for _ in range(world)]
            self.reply_bell_fds = [self._bell() if doorbell else -1 for _ in range(world)]
            self.lifeline_fd, self._lifeline_write = (self._keep(fd) for fd in os.pipe2(os.O_CLOEXEC))
        except OSError as error:
            self.close()
            if error.errno in (errno.ENOMEM, errno.ENOSPC):
                raise DeviceError(_short_of_memory(needed, os.strerror(error.errno))) from None
            raise DeviceError(f"descriptors of the run: cannot be made: {error}; raise `ulimit -n`, or lower --world") from None

    def beat(self, rank: int) -> Beat | None:
        """The newest progress record of a rank, of whichever incarnation wrote last."""
        with memoryview(self._beats[rank]) as memory:
            return heartbeat.read(memory)

    def close(self) -> None:
        """The children's lifeline ends here, if they have not ended yet."""
        for beat in self._beats:
            beat.close()
        for fd in self._open:
            os.close(fd)
        self._open, self._beats = [], []

    def __enter__(self) -> Channels:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _keep(self, fd: int) -> int:
        self._open.append(fd)
        return fd

    def _bell(self) -> int:
        return self._keep(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))

    def _memory(self, name: str, size: int, needed: int) -> int:
        fd = self._keep(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.posix_fallocate(fd, 0, size)
        # No process can cut it short under the others (which would be their SIGBUS).
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd


def supervision_pair() -> tuple[socket.socket, socket.socket]:
    """(launcher's end, coordinator's end) of wire.supervision."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _short_of_memory(needed: int, found: str) -> str:
    return f"slot memory: {-(-needed // MIB)} MiB needed, {found}; lower --prefill-chunk or --world, or raise the memory limit"
