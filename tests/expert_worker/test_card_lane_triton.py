"""The card lane with the triton sibling: kernels in Triton's interpreter, rows from a real checkpoint, a bad scale."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_card_lane import ALL, FULL, TOKENS, Bench, EmulatedCard, close_to
from triton_host import HostKernel

from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.errors import PayloadError
from evrun.kernels.triton.params import Call
from evrun.kernels.triton.plan import Unit

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, where a card goes on silently
]


class InterpretedCard(EmulatedCard):
    def kernels(self, units: Sequence[Unit], call: Call, cache: Path) -> list[HostKernel]:
        return [HostKernel(unit, call) for unit in units]


@pytest.mark.parametrize("combine", ["partial", "exact"])
def test_calls(tmp_path: Path, combine: str) -> None:
    bench = Bench(tmp_path, InterpretedCard(tmp_path), card_kernel="triton", combine=combine)
    assert bench.lane.backend == "emulated triton-mma"
    for tokens, experts in ((1, [0, 3, 7, 9, 20]), (4, list(range(12)))):
        close_to(*bench.both(3, tokens, experts))
    bench.close()


def test_a_bad_scale_is_named(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(FULL, copy)
    scale = next(t for t in Checkpoint.open(copy).expert(3, 2) if t.name.endswith("w2.scale"))
    with scale.shard.open("r+b") as shard:
        shard.seek(scale.offset + 4 * scale.data.shape[1])
        shard.write(b"\xff")
    bench = Bench(tmp_path, InterpretedCard(tmp_path), copy, card_kernel="triton")
    with pytest.raises(PayloadError, match=rf"{scale.name} row 4.*found 255"):
        bench.both(3, TOKENS, ALL)
    bench.close()
