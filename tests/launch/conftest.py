from __future__ import annotations

from collections.abc import Iterator

import pytest
from command import REAL, World


@pytest.fixture
def world() -> Iterator[World]:
    """Commands with stand-ins for coordinator and workers; fails when processes or run files are left behind."""
    made = World()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def served() -> Iterator[World]:
    """A run of two ranks that the tests of a module share."""
    made = World()
    try:
        made.launch("--world", "2", "--on-loss", "wait")
        yield made
        made.stop()
    finally:
        made.close()


@pytest.fixture
def plain() -> Iterator[World]:
    """The real command, for what never starts a process."""
    made = World(REAL)
    try:
        yield made
    finally:
        made.close()
