"""Requests keep their bytes while workers are killed, stopped, continued and damaged."""

import numpy as np
import pytest
from runs import Evrun
from safetensors.numpy import load
from soak import PROMPT, disturbed, undisturbed


def percentile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))]


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(12, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
        pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
        pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
)
def test_exact_answers_stay_byte_identical(evrun: Evrun, faults: int) -> None:
    ids, logits = undisturbed(evrun, "exact")
    outcome = disturbed(evrun, "exact", faults, seed=faults)
    assert outcome.hits.count >= faults
    for got_ids, got_logits in outcome.requests:
        assert got_ids == ids
        assert got_logits == logits
    assert outcome.restarts >= len(outcome.hits.kills) * 0.5
    found, back = outcome.detection_s, outcome.return_s
    print(  # noqa: T201 (shown with -s: the figures of a long run)
        f"\n{outcome.hits.count} faults ({len(outcome.hits.kills)} kills), {len(outcome.requests)} requests, {outcome.resends} resends, "
        f"{outcome.dropped} dropped replies, {outcome.restarts} restarts; death to resend: median {percentile(found, 0.5) * 1e3:.0f} ms, "
        f"p99 {percentile(found, 0.99) * 1e3:.0f} ms, worst {found[-1] * 1e3:.0f} ms; "
        f"death to serving again: median {percentile(back, 0.5):.2f} s, worst {back[-1]:.2f} s"
    )


@pytest.mark.slow
def test_partial_answers_keep_their_tokens_but_at_near_ties(evrun: Evrun) -> None:
    ids, logits_file = undisturbed(evrun, "partial")
    logits = load(logits_file)["logits"]
    for got_ids, got_file in disturbed(evrun, "partial", 12, seed=5).requests:
        first = next((i for i, (a, b) in enumerate(zip(got_ids, ids, strict=True)) if a != b), None)
        if first is not None:
            row = len(PROMPT) - 1 + first
            second, best = np.sort(logits[row])[-2:]
            assert best - second <= 2 * np.abs(load(got_file)["logits"][row] - logits[row]).max()
