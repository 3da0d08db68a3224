from __future__ import annotations

import io
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evrun.launch.screen import GIB, MIB, Loading, Pipe, Rate, Terminal, loading_text, replay


class Recorder:
    """A screen that keeps what it was told."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def note(self, text: str) -> None:
        self.said.append(text)

    def line(self, text: str) -> None:
        self.said.append(f"line {text}")

    def loading(self, loading: Loading) -> None:
        self.said.append(loading)

    def ready(self, report: list[str]) -> None:
        self.said.append(report)

    def close(self) -> None:
        self.said.append("closed")


def test_the_loading_line() -> None:
    loading = Loading("dense tree: embed", GIB, 5 * GIB, ["rank 1", "rank 2"])
    expected = "loading: dense tree: embed, 1.00 of 5.00 GiB, 512 MiB/s, 8 s to go; waiting for rank 1, rank 2"
    assert loading_text(loading, (512.0 * MIB, 8.0)) == expected
    assert loading_text(Loading("starting", 0, 0, []), None) == "loading: starting"


def test_the_rate_is_of_what_was_loaded_since_the_first_look() -> None:
    rate = Rate()
    assert rate.of(10.0, 100, 1000) is None
    assert rate.of(11.0, 100, 1000) is None
    assert rate.of(12.0, 300, 1000) == (100.0, 7.0)


def test_plain_lines_are_few() -> None:
    out = io.StringIO()
    terminal = Terminal(out)
    for done in range(50):
        terminal.loading(Loading("dense tree", done, 100, []))
    terminal.note("a note")
    terminal.ready(["report"])
    assert out.getvalue() == "loading: dense tree, 0.00 of 0.00 MiB\nevrun: a note\nreport\n"


def test_a_terminal_shows_a_bar_and_takes_it_away() -> None:
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Tty()
    terminal = Terminal(out)
    terminal.loading(Loading("dense tree", MIB, 4 * MIB, ["rank 1"]))
    terminal.ready(["report"])
    assert "dense tree" in out.getvalue()
    assert "waiting for rank 1" in out.getvalue()
    assert out.getvalue().endswith("report\n")


def test_a_screen_that_is_gone_does_not_end_the_run() -> None:
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it fails
    terminal = Terminal(full)
    terminal.note("lost")
    terminal.ready(["lost too"])
    with pytest.raises(OSError, match="No space left"):
        full.close()


texts = st.text(max_size=50)


@given(notes=st.lists(texts, max_size=5), done=st.integers(0, 1 << 40), report=st.lists(texts, max_size=3))
def test_what_goes_through_the_pipe_comes_out_the_same(notes: list[str], done: int, report: list[str]) -> None:
    read_fd, write_fd = os.pipe()
    pipe, seen = Pipe(write_fd), Recorder()
    loading = Loading("p", done, 1 << 41, ["rank 1"])
    for text in notes:
        pipe.note(text)
    pipe.line("a line")
    pipe.loading(loading)
    pipe.ready(report)
    pipe.note("after the end")
    pipe.close()
    with os.fdopen(read_fd, "rb") as lines:
        ends = [replay(line, seen) for line in lines]
    assert seen.said == [*notes, "line a line", loading, report]
    assert ends == [None] * (len(notes) + 2) + [(0, None)]


def test_the_last_word_arrives_whole_however_long() -> None:
    read_fd, write_fd = os.pipe()
    pipe = Pipe(write_fd)
    error = "x" * 50_000
    pipe.ended(3, error)
    with os.fdopen(read_fd, "rb") as lines:
        assert [replay(line, Recorder()) for line in lines] == [(3, error)]


def test_a_reader_that_does_not_read_costs_progress_only() -> None:
    read_fd, write_fd = os.pipe()
    pipe = Pipe(write_fd)
    for _ in range(3000):
        pipe.note("y" * 100)
    os.close(read_fd)
    pipe.note("nobody is there")
    pipe.ended(5, "nobody is there")
