from collections.abc import Iterator

import pytest
from runs import Evrun, evrun_in


@pytest.fixture
def evrun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evrun]:
    with evrun_in(tmp_path_factory.mktemp("e")) as command:  # short: an ipc path has 107 bytes at most
        yield command
