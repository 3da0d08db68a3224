from __future__ import annotations

from collections.abc import Iterator

import pytest
from runs import Evrun, evrun_in
from served import Served, serving


@pytest.fixture
def evrun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evrun]:
    with evrun_in(tmp_path_factory.mktemp("e")) as command:  # short: an ipc path has 107 bytes at most
        yield command


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One run for all tests of a file."""
    with evrun_in(tmp_path_factory.mktemp("e")) as command, serving(command, "--combine", "exact", "--max-context", "2000") as run:
        yield run
