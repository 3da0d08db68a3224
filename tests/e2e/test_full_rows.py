"""Rows of the release's own size: same bytes in every world, and no expert is ever expanded."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import Evrun, evrun_in, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROMPT = [0, 3, 17, 200, 41, 9]
MAX_GROWTH_BYTES = 16 << 20
"""Of a worker's own memory beside its slots; one w1 in bf16 would be 23.6 MB."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("rows")
    with evrun_in(tmp_path_factory.mktemp("e")) as evrun:
        evrun("make-checkpoint", str(folder / "full-rows"), "--preset", "full-rows", timeout_s=300)
    yield folder / "full-rows"
    for path in sorted((folder / "full-rows").iterdir()):
        path.unlink()


def rss_anon(pid: int) -> int:
    match = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match
    return int(match[1]) << 10


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_a_workers_own_memory_does_not_grow(evrun: Evrun, checkpoint: Path, kernel: str) -> None:
    with running(evrun, checkpoint, "--cpu-kernel", kernel, "--prefill-chunk", "16", world=2):
        before = [rss_anon(r["pid"]) for r in evrun.ranks()]
        evrun.generate(PROMPT, new=20)
        after = [rss_anon(r["pid"]) for r in evrun.ranks()]
    growth = [b - a for a, b in zip(before, after, strict=True)]
    assert max(growth) < MAX_GROWTH_BYTES, growth


def test_exact_bytes_are_equal_in_every_world(evrun: Evrun, checkpoint: Path) -> None:
    files = {}
    for world, deal in ((1, "sorted"), (2, "home"), (3, "sorted"), (4, "home"), (7, "sorted")):
        with running(evrun, checkpoint, "--combine", "exact", "--deal", deal, "--prefill-chunk", "16", world=world):
            files[world, deal] = evrun.dumped(PROMPT, new=8).logits_file
    assert len(set(files.values())) == 1, {k: hash(v) for k, v in files.items()}
