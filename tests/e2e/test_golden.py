"""`evrun launch` and `evrun generate` against what the reference implementation computed (golden/README.md)."""

import numpy as np
import pytest
from runs import GOLDEN, VARIANTS, Evrun, expected, prompts, running

TIGHT = 1e-3


def check_tight(run: Evrun, config: str, variant: str, prompt: dict, name: str = "default") -> None:
    """Every row within 1e-3, greedy ids and expert sets equal."""
    want = expected(config, variant, prompt["name"])
    answer, logits, routes, _ = run.dumped(prompt["ids"], name=name)
    assert answer["token_ids"] == want["greedy_ids"].tolist()
    assert answer["finish_reason"] == "length"
    assert logits.shape == (len(prompt["ids"]) + 15, want["logits"].shape[1])
    assert np.abs(logits - np.concatenate([want["logits"], want["greedy_logits"]])).max() <= TIGHT
    for key, ids in want.items():
        if key.endswith("expert_ids"):
            decode = key.startswith("greedy.")
            got = routes[key.removeprefix("greedy.")]
            got = got[len(prompt["ids"]) :] if decode else got[: len(prompt["ids"])]
            assert (np.sort(got, 1) == np.sort(ids, 1)).all(), key


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("config", "variant"),
    [("full", "fp32"), *(pytest.param(c, v, marks=slow) for c, v in (("full", "fp32noaq"), ("minimal", "fp32"), ("minimal", "fp32noaq")))],
)
def test_float32_variants_are_tight(evrun: Evrun, config: str, variant: str) -> None:
    dtype, numerics = VARIANTS[variant]
    with running(evrun, GOLDEN / config / "checkpoint", "--dtype", dtype, "--numerics", numerics):
        for prompt in prompts(config):
            check_tight(evrun, config, variant, prompt)


@slow
def test_the_long_text_is_tight(evrun: Evrun) -> None:
    with running(evrun, GOLDEN / "long" / "checkpoint", "--dtype", "float32", "--numerics", "weights-only", world=2):
        prompt = next(p for p in prompts("long") if p["name"] == "text-long")
        check_tight(evrun, "long", "fp32noaq", prompt)


@pytest.mark.parametrize("config", ["full", pytest.param("minimal", marks=slow)])
def test_bf16_stays_within_its_loose_bounds(evrun: Evrun, config: str) -> None:
    difference, same = [], []
    with running(evrun, GOLDEN / config / "checkpoint"):
        for prompt in prompts(config):
            want = expected(config, "bf16", prompt["name"])["logits"]
            _, logits, _, _ = evrun.dumped(prompt["ids"])
            difference.append(np.abs(logits[: len(want)] - want).max(1))
            same.append(logits[: len(want)].argmax(1) == want.argmax(1))
    assert np.median(np.concatenate(difference)) <= 0.6
    assert np.concatenate(same).mean() >= 0.8
