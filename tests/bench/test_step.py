"""`evrun bench step`: spans are cut into phases that add up, workers are timed only on demand, bad input is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evrun.bench.__main__ import main as bench_main
from evrun.bench.step.phases import PHASES, Pass, RankSpans, exclusive, split
from evrun.bench.step.run import card_cache
from evrun.bench.step.trace import trace
from evrun.expert_worker.timeline import WORKER_PHASES, Part, Span, Timeline, read
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.launch.config import RunConfig
from evrun.launch.devices import Card, Machine
from evrun.launch.plan import Plan, make_plan

CHECKPOINT = Path(__file__).parents[1] / "golden/minimal/checkpoint"
MS = 1_000_000


def span(phase: str, start_ms: float, end_ms: float) -> Span:
    return Span(phase, int(start_ms * MS), int(end_ms * MS))


def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["evrun bench", "step", *arguments])
    code = bench_main()
    out, err = capfd.readouterr()
    return code, out, err


def test_one_layer_by_hand() -> None:
    # Attention 10 ms, submit 2 (deal 0.5), shared expert 5, collect 20 with 1 of combine at its end, head 4.
    spans = (span("deal", 10.5, 11), span("submit", 10, 12), span("combine", 35.5, 36.5), span("collect", 17, 37))
    one = Pass("decode", 1, 1, 0, 41 * MS, spans)
    slow = [span("stage", 15, 21), span("upload", 14, 24), span("launch", 24, 25), span("drain", 25, 33), span("compute", 13, 33.5)]
    quick = [span("launch", 13, 15), span("compute", 13, 16)]
    seconds = split(one, [RankSpans(quick), RankSpans(slow)])
    ms = {phase: round(s * 1e3, 6) for phase, s in seconds.visible.items()}
    assert ms == {
        "dense tree": 15.0, "deal": 0.5, "send": 1.5, "stage": 4.0, "upload": 3.0, "launch": 1.5, "drain": 8.0, "answer": 2.5,
        "combine": 1.0, "head": 4.0,
    }  # fmt: skip
    assert sum(ms.values()) == pytest.approx(seconds.wall * 1e3)
    assert {p: round(s * 1e3, 6) for p, s in seconds.worker.items()} == {"stage": 6.0, "upload": 4.0, "launch": 2.5, "drain": 8.0}


def test_nested_spans_count_once() -> None:
    total = exclusive([span("stage", 2, 3), span("stage", 4, 6), span("upload", 1, 8), span("compute", 0, 10)])
    assert {p: ns / MS for p, ns in total.items()} == {"stage": 3.0, "upload": 4.0, "launch": 3.0, "drain": 0.0}


def test_a_layer_without_spans_is_no_dense_tree() -> None:
    with pytest.raises(AssertionError, match="without a span"):
        split(Pass("decode", 1, 2, 0, MS, (span("submit", 0, 0.1), span("collect", 0.2, 0.3))), [])


def test_the_trace_has_a_row_a_process() -> None:
    found = trace([("coordinator", [span("forward", 5, 9)]), ("rank 0", [span("compute", 6, 7)])])
    assert [e["args"]["name"] for e in found["traceEvents"] if e["ph"] == "M"] == ["coordinator", "rank 0"]
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in found["traceEvents"] if e["ph"] == "X"] == [
        (0, "forward", 0.0, 4000.0), (1, "compute", 1000.0, 1000.0),
    ]  # fmt: skip


class Owner:
    def work(self, value: int) -> int:
        if value < 0:
            raise ValueError(value)
        return value + 1


def test_a_timeline_times_one_object_and_changes_nothing_else(tmp_path: Path) -> None:
    mine, other = Owner(), Owner()
    timeline = Timeline()
    timeline.wrap([Part(mine, "work", "launch"), Part(mine, "missing", "stage"), Part(None, "call", "stage")])
    assert (mine.work(1), other.work(1)) == (2, 2)
    with pytest.raises(ValueError, match="-1"):
        mine.work(-1)
    assert [s.phase for s in timeline.spans] == ["launch", "launch"]
    timeline.write(str(tmp_path / "spans"))
    assert read(tmp_path / "spans") == timeline.spans
    assert read(tmp_path / "nothing") == []


def test_workers_that_share_a_card_share_its_memory() -> None:
    card = Machine((Card(0, "GPU-a", "H", 80, (9, 0)), Card(1, "GPU-b", "H", 80, (9, 0))), "", ((0,), (1,)), "")
    config = Checkpoint.open(CHECKPOINT).config

    def plan(*workers: str) -> Plan:
        return make_plan(RunConfig(checkpoint=str(CHECKPOINT), workers=workers), card, config, {})

    assert card_cache(plan("cuda:0", "cuda:1", "cpu")) == -1
    assert card_cache(plan("cuda:0", "cuda:1", "cuda:0")) == 30
    assert card_cache(plan("cpu")) == -1


def test_a_small_step_from_end_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--checkpoint", str(CHECKPOINT), "--world", "1,2", "--prompt-tokens", "12", "--prefill-chunk", "5", "--decode-tokens", "3"]
    code, out, err = run(capfd, monkeypatch, *arguments, "--trace", str(tmp_path / "t.json"), "--json")
    assert (code, err) == (0, "")
    rows: list[dict[str, Any]] = json.loads(out)["rows"]
    runs = {(r["world"], r["pass"], r["kind"]) for r in rows}
    assert runs == {(w, p, k) for w in (1, 2) for p in (1, 2) for k in ("prefill", "decode")}
    for key in runs:
        mine = {r["phase"]: r for r in rows if (r["world"], r["pass"], r["kind"]) == key}
        assert list(mine) == [*PHASES, "sum", "wall"]
        assert sum(mine[p]["seconds"] for p in PHASES) == pytest.approx(mine["sum"]["seconds"])
        assert 0.95 <= mine["sum"]["of_wall"] <= 1.05
        assert mine["launch"]["worker_seconds"] > 0
        assert all(mine[p]["worker_seconds"] == 0 for p in WORKER_PHASES if p != "launch")
        assert mine["dense tree"]["seconds"] > mine["deal"]["seconds"] > 0
        assert (mine["wall"]["tokens"], mine["wall"]["steps"]) == ((12, 3) if key[2] == "prefill" else (1, 3))
    names = {e["name"] for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]}
    assert names >= {"forward", "submit", "deal", "collect", "combine", "compute", "launch"}


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["--world", "0"], 2, "--world: expected worker counts"),
        (["--world", "one"], 2, "--world: expected worker counts"),
        (["--workers", "gpu"], 2, "--workers: expected cpu or cuda:K, found 'gpu'"),
        (["--workers", "cuda:7", "--checkpoint", str(CHECKPOINT)], 4, "cannot have a card"),
        (["--checkpoint", "/no/such/folder"], 3, "expected a checkpoint directory, found nothing"),
        (["--trace", "/no/such/folder/t.json"], 2, "expected a file in a folder that exists"),
        (["--decode-tokens", "0"], 2, "--decode-tokens"),
    ],
)
def test_bad_input(
    arguments: list[str], exit_code: int, words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(capfd, monkeypatch, *arguments)
    assert (code, out) == (exit_code, "")
    assert words in err


def test_the_table_for_people(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--checkpoint", str(CHECKPOINT), "--world", "1", "--prompt-tokens", "4", "--decode-tokens", "1"]
    code, out, _ = run(capfd, monkeypatch, *arguments)
    assert code == 0
    assert "world 1, pass 2" in out
    assert out.count("dense tree") == 2
