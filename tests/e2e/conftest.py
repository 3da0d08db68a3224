from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import Evrun, evrun_in


@pytest.fixture
def evrun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evrun]:
    folder: Path = tmp_path_factory.mktemp("e")  # short: an ipc path has 107 bytes at most
    with evrun_in(folder) as command:
        yield command
