import pytest
import torch

from evrun.coordinator.sampler import Sampler, best, log_probabilities, nucleus


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(1000)
    logits[[7, 600]] = 3.0
    assert Sampler(0.0, 1).pick(logits) == 7
    assert [i for i, _ in best(logits, 3)] == [7, 600, 0]


def test_a_seed_gives_the_same_tokens() -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(1))
    draws = [[Sampler(1.0, seed).pick(logits) for _ in range(1)] + [s.pick(logits) for _ in range(20)]
             for seed in (5, 5, 6) for s in [Sampler(1.0, seed)]]  # fmt: skip
    assert draws[0] == draws[1] != draws[2]


def test_frequencies_follow_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -30.0])
    sampler = Sampler(0.7, 3)
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[sampler.pick(logits)] += 1
    assert torch.allclose(counts / 4000, torch.softmax(logits / 0.7, -1), atol=0.03)
    assert counts[3] == 0


def test_top_p_keeps_the_likeliest_tokens_that_reach_it() -> None:
    probabilities = torch.tensor([0.1, 0.5, 0.15, 0.25], dtype=torch.float64)
    assert nucleus(probabilities, 0.5).tolist() == [0, 0.5, 0, 0]
    assert nucleus(probabilities, 0.51).tolist() == [0, 0.5, 0, 0.25]
    assert nucleus(probabilities, 1e-9).tolist() == [0, 0.5, 0, 0]
    logits = probabilities.log().float()
    assert {Sampler(1.0, seed, 0.7).pick(logits) for seed in range(60)} == {1, 3}


def test_log_probabilities_begin_with_the_token_itself() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    found = log_probabilities(logits, 0, 2)
    assert [i for i, _ in found] == [0, 1, 2]
    expected = torch.log_softmax(logits.double(), -1)
    assert all(value == pytest.approx(float(expected[i])) for i, value in found)
