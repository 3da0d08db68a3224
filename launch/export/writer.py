"""Writes a checkpoint directory: streams, in bounded memory, whole or not at all.

Everything is written into a hidden folder inside the target and moved to its name at the end, the index last: what
has a checkpoint's name is complete. On any error the hidden folder goes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy.typing as npt

from evrun.expert_worker.wire.checkpoint.dtypes import ITEM_BYTES
from evrun.expert_worker.wire.checkpoint.header import Spec
from evrun.expert_worker.wire.checkpoint.shards import INDEX_FILE
from evrun.expert_worker.wire.errors import RunError, UsageError
from evrun.launch.export import documents
from evrun.launch.export.plan import ShardPlan

Payload = Callable[[str, Spec], Iterable[npt.NDArray[Any]]]
"""(tensor name, spec) -> its bytes in order, as C-contiguous pieces. Called from several threads, once per tensor."""

Progress = Callable[[int, int], None]
"""(bytes written, bytes in all), called from several threads."""

OWN_PATTERNS = ("model*.safetensors", INDEX_FILE, "config.json", "inference/config.json", "tokenizer.json", "tokenizer_config.json")
"""What a checkpoint consists of, and all that `force` removes."""

_BUFFER_BYTES = 1 << 20
_PARTIAL = ".partial-"


class Cancelled(Exception):
    """Another shard failed."""


def write_files(
    directory: str | Path,
    plan: Sequence[ShardPlan],
    payload: Payload,
    files: Mapping[str, str],
    *,
    force: bool = False,
    progress: Progress | None = None,
    threads: int = 2,
) -> int:
    """Write the shards of `plan`, `files` (relative name -> text) and the index. Returns the bytes of all tensors.

    Raises UsageError when the directory is not empty (and not `force`: then the checkpoint in it is replaced, other
    files stay), RunError when the disk is full or cannot be written; nothing is left behind then.
    """
    directory = Path(directory)
    headers = {shard.file: _header(shard) for shard in plan}
    total = sum(size for _, size in headers.values())
    made = _prepare(directory, force)
    partial = directory / f"{_PARTIAL}{os.getpid()}"
    try:
        _check_room(directory, sum(len(head) + size for head, size in headers.values()))
        partial.mkdir()
        _write_shards(partial, plan, headers, payload, progress or (lambda done, of: None), total, threads)
        weight_map = {name: shard.file for shard in plan for name, _ in shard.tensors}
        texts = {**files, INDEX_FILE: documents.index(weight_map, total)}
        for name, text in texts.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_text(text, encoding="utf-8")
        _publish(partial, directory, [*(shard.file for shard in plan), *texts])
    except OSError as error:
        hint = "free some space or choose another disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "choose another place"
        raise RunError(f"{directory}: cannot write the checkpoint ({error.strerror}); nothing was kept, {hint}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if made:
            with contextlib.suppress(OSError):
                directory.rmdir()  # only when nothing was published
    return total


def tensor_bytes(spec: Spec) -> int:
    return ITEM_BYTES[spec[0]] * math.prod(spec[1])


def _header(shard: ShardPlan) -> tuple[bytes, int]:
    """(length and JSON of the header, bytes of the tensors). Padded so that the tensors begin at a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in shard.tensors:
        size = tensor_bytes((dtype, shape))
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, at


def _prepare(directory: Path, force: bool) -> bool:
    """Make the directory, or see that it is empty. Whether it was made."""
    try:
        directory.mkdir(parents=True)
        return True
    except FileExistsError:
        pass
    except OSError as error:
        raise UsageError(f"{directory}: cannot be made ({error.strerror}); choose another place") from error
    try:
        present = os.listdir(directory)
    except OSError as error:
        raise UsageError(f"{directory}: expected a directory to write into ({error.strerror}); choose another place") from error
    if present and not force:
        found = f"found {len(present)} entries; choose another, or replace the checkpoint in it with --force"
        raise UsageError(f"{directory}: expected an empty directory, {found}")
    for name in present:
        if name.startswith(_PARTIAL):
            shutil.rmtree(directory / name, ignore_errors=True)
    return False


def _check_room(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise RunError(f"{directory}: the checkpoint takes {needed} bytes, {free} are free; nothing was written, choose another disk")


def _write_shards(
    partial: Path,
    plan: Sequence[ShardPlan],
    headers: Mapping[str, tuple[bytes, int]],
    payload: Payload,
    progress: Progress,
    total: int,
    threads: int,
) -> None:
    stop = threading.Event()
    lock = threading.Lock()
    done = 0

    def count(size: int) -> None:
        nonlocal done
        if stop.is_set():
            raise Cancelled
        with lock:
            done += size
            progress(done, total)

    def write(shard: ShardPlan) -> None:
        try:
            write_shard(shard)
        except BaseException:
            stop.set()
            raise

    def write_shard(shard: ShardPlan) -> None:
        head, size = headers[shard.file]
        with open(partial / shard.file, "wb", buffering=_BUFFER_BYTES) as file:
            os.posix_fallocate(file.fileno(), 0, len(head) + size)
            file.write(head)
            for name, spec in shard.tensors:
                written = 0
                for piece in payload(name, spec):
                    file.write(piece.data)
                    written += piece.nbytes
                    count(piece.nbytes)
                wanted = tensor_bytes(spec)
                if written != wanted:
                    raise RunError(f"{name}: expected {wanted} bytes of payload for {spec[0]} {list(spec[1])}, found {written}")

    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="shard") as pool:
        futures = [pool.submit(write, shard) for shard in plan]
        try:
            for future in futures:
                future.result()
        except BaseException as error:
            stop.set()
            pool.shutdown(cancel_futures=True)
            causes = [e for f in futures if not f.cancelled() and (e := f.exception()) and not isinstance(e, Cancelled)]
            if isinstance(error, Cancelled) and causes:
                raise causes[0] from None
            raise


def _publish(partial: Path, directory: Path, names: Sequence[str]) -> None:
    """Move everything to its name, the index last; an older checkpoint loses its index first."""
    (directory / INDEX_FILE).unlink(missing_ok=True)
    for pattern in OWN_PATTERNS:
        for old in directory.glob(pattern):
            if not old.is_dir():
                old.unlink()
    for name in names:
        (directory / name).parent.mkdir(exist_ok=True)
        os.replace(partial / name, directory / name)
