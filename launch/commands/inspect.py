"""`evrun inspect`."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evrun.expert_worker.wire.errors import CHECKPOINT, EvrunError, RunError, UsageError
from evrun.launch.options import json_option

if TYPE_CHECKING:
    from evrun.expert_worker.wire.checkpoint.shards import Shard
    from evrun.launch.inspection.report import Report
    from evrun.launch.screen import Terminal

MOST_THREADS = 8
REFRESH_S = 0.1


@click.command("inspect")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--deep", is_flag=True, help="Read every byte: NaN codes, zero rows, scale bytes 0 and 255, digests.")
@click.option("--require-complete", is_flag=True, help="What is not there yet fails.")
@click.option("--digests", metavar="FILE", type=click.Path(path_type=Path), help="Compare with these SHA-256 sums; implies --deep.")
@click.option("--write-digests", metavar="FILE", type=click.Path(path_type=Path), help="Write the sums, as sha256sum does; implies --deep.")
@click.option("--threads", metavar="N", type=click.IntRange(1, 256), default=None, help="Shards read at once. [default: cores, at most 8]")
@json_option
def command(
    directory: Path, deep: bool, require_complete: bool, digests: Path | None, write_digests: Path | None, threads: int | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Check a checkpoint without starting anything: whole, sound, and the release's own figures where it is the release.

    DIR is a checkpoint's folder or a model's folder in a Hugging Face cache. Every check passes, fails or is undecided:
    what it is about is still being downloaded. Exit code 3 when one fails.
    """
    from evrun.launch.inspection.digests import read_digests
    from evrun.launch.inspection.headers import inspect_headers
    from evrun.launch.inspection.place import snapshot_of
    from evrun.launch.inspection.table import print_report

    wanted = read_digests(digests) if digests else None
    if write_digests and not write_digests.absolute().parent.is_dir():
        raise UsageError(f"--write-digests {write_digests}: expected a file in a folder that exists")
    report, found = inspect_headers(snapshot_of(directory))
    if (deep or digests or write_digests) and found.shards:
        unsound = {p.file for p in found.problems if p.part == "shard"}
        sums = _deep(report, [s for s in found.shards if s.path.name not in unsound], wanted, write_digests is not None, threads)
        if write_digests:
            _write(write_digests, sums)
    if require_complete:
        report.require_complete()
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        print_report(report)
    if report.verdict != "fail":
        return 0
    raise _refusal(report)


def _deep(report: Report, shards: list[Shard], wanted: dict[str, str] | None, hash_all: bool, threads: int | None) -> dict[str, str]:
    from evrun.launch.devices import look
    from evrun.launch.inspection.payload import inspect_payload
    from evrun.launch.screen import Terminal

    terminal = Terminal()
    try:
        progress = _Reporter(terminal, sum(s.identity[2] for s in shards))
        count = threads or max(2, min(MOST_THREADS, len(look({}).cores)))
        return inspect_payload(report, shards, wanted, hash_all, progress, count)
    finally:
        terminal.close()


def _write(path: Path, sums: dict[str, str]) -> None:
    from evrun.launch.inspection.digests import write_digests

    try:
        write_digests(path, sums)
    except OSError as error:
        raise RunError(f"--write-digests {path}: {error.strerror}; nothing was written") from error


def _refusal(report: Report) -> EvrunError:
    """One line: how many, and the first."""
    failed = [c for c in report.checks if c.outcome == "fail"]
    first = next((line for c in failed for line in c.problems), f"{failed[0].subject}: {failed[0].found}")
    error = EvrunError(f"checkpoint {report.directory}: {len(failed)} of {len(report.checks)} checks fail, first: {first}")
    error.exit_code = CHECKPOINT
    return error


class _Reporter:
    """Adds up what the threads read and passes it on, a few times a second."""

    def __init__(self, terminal: Terminal, total: int) -> None:
        self._terminal, self._total = terminal, total
        self._lock = threading.Lock()
        self._done = 0
        self._next_s = time.monotonic() + REFRESH_S

    def __call__(self, count: int) -> None:
        from evrun.launch.screen import Loading

        with self._lock:
            self._done += count
            now_s = time.monotonic()
            if now_s >= self._next_s:
                self._next_s = now_s + REFRESH_S
                self._terminal.loading(Loading("reading the payload", self._done, self._total, []))
