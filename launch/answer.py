"""A request seen from the terminal: text to stdout as it comes, everything else to stderr, or one JSON object."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from evrun.expert_worker.wire.errors import RUNNING, EvrunError
from evrun.expert_worker.wire.requests import Started, Token
from evrun.launch import client, control, report
from evrun.launch.config import RequestConfig
from evrun.launch.report import Result
from evrun.launch.run_dir import RunInfo
from evrun.launch.screen import Screen

PREFILL_EVERY_S = 2.0


class Narrator:
    """Follows one answer: `client.Listener`."""

    def __init__(self, screen: Screen, streams: bool, said: list[str]) -> None:
        self._screen, self._streams, self._said = screen, streams, said
        self._prefill_at_s = time.monotonic()

    def queued(self, ahead: int) -> None:
        if ahead:
            self._screen.note(f"{ahead} request{'s' if ahead > 1 else ''} ahead of this one")

    def started(self, started: Started) -> None:
        for line in (started.report, report.prompt_line(started)):
            if line and line not in self._said:
                self._screen.line(line)

    def prefill(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if done < total and now_s - self._prefill_at_s >= PREFILL_EVERY_S:
            self._prefill_at_s = now_s
            self._screen.line(f"prefill: {done} of {total} tokens")

    def token(self, token: Token) -> None:
        if self._streams and token.text:
            write_out(token.text)


def answer(
    info: RunInfo, config: RequestConfig, screen: Screen, said: list[str], cancel_fd: int = -1, why_lost: Callable[[], str] = str,
    may_print: Callable[[], bool] = lambda: True,
) -> Result:  # fmt: skip
    """Send the request, show the answer as asked for, and give the result; its error line is the caller's to print.

    said       lines of the build report that were shown already
    may_print  asked once, right before the JSON object is printed: another thread may have printed one
    Raises what `client.request` raises, BrokenPipeError when nobody reads stdout.
    """
    workers = _workers(info, [])
    try:
        narrator = Narrator(screen, not config.json, said)
        result = client.request(info.requests_path, info.secret, config.message(), narrator, cancel_fd, why_lost)
    except EvrunError as error:
        result = Result()
        result.fail(error.exit_code, str(error))
    if config.json:
        refused = result.error is not None and result.started is None and result.exit_code != RUNNING
        if not refused:
            workers = _workers(info, workers)
            if may_print():
                print_json(result, info, workers, config)
    elif result.text:
        write_out("\n")
    if result.finished is not None and result.error is None:
        screen.line(report.end_line(result.finished))
    return result


def print_json(result: Result, info: RunInfo, workers: list[dict[str, Any]], config: RequestConfig) -> None:
    settings = {name: getattr(info, name) for name in ("world", "deal", "combine", "numerics", "dtype")}
    write_out(json.dumps(report.json_object(result, settings, workers, config.top_logits > 0), ensure_ascii=False) + "\n")


def write_out(text: str) -> None:
    """To stdout as UTF-8, whatever the locale says, at once."""
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()


def _workers(info: RunInfo, otherwise: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `ps --json`; `otherwise` when the launcher does not say."""
    try:
        rows: list[dict[str, Any]] = json.loads(control.ask(info, control.Ps(), within_s=2.0).text)["processes"]
    except EvrunError:
        return otherwise
    return rows
