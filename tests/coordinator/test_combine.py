import numpy as np
import pytest
import torch

from evrun.coordinator.combine import Share, combine_partials, combine_rows, widen
from evrun.coordinator.deal import deal

T, K, H, EXPERTS = 9, 3, 16, 12


@pytest.fixture
def routes() -> np.ndarray:
    random = np.random.default_rng(3)
    return np.stack([random.permutation(EXPERTS)[:K] for _ in range(T)]).astype(np.int32)


def rows_of(ids: np.ndarray, expert: int) -> np.ndarray:
    tokens = np.nonzero(ids == expert)[0]
    return np.random.default_rng(expert).standard_normal((len(tokens), H)).astype(np.float32) * 1e3


def in_the_references_order(ids: np.ndarray) -> np.ndarray:
    out = np.zeros((T, H), np.float32)
    for expert in sorted(set(ids.ravel().tolist())):
        out[np.nonzero(ids == expert)[0]] += rows_of(ids, expert)
    return out


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("policy", ["sorted", "home"])
def test_rows_add_up_to_the_same_bits_in_every_world_and_order(routes: np.ndarray, world: int, policy: str) -> None:
    dealt = deal(routes.ravel().tolist(), range(world), policy)
    shares = [Share(rank, experts, np.concatenate([rows_of(routes, e) for e in experts])) for rank, experts in dealt.items()]
    out = np.full((T, H), np.nan, np.float32)
    for arrived in (shares, shares[::-1]):
        combine_rows(arrived, routes, out)
        assert out.tobytes() == in_the_references_order(routes).tobytes()


def test_partials_add_in_rank_order_whoever_came_first() -> None:
    partials = [np.full((1, 1), v, np.float32) for v in (1e8, 1.0, -1e8)]
    shares = [Share(rank, [rank], p) for rank, p in enumerate(partials)]
    out = np.empty((1, 1), np.float32)
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        combine_partials([shares[i] for i in order], out)
        assert out[0, 0] == np.float32(np.float32(1e8) + np.float32(1.0)) + np.float32(-1e8)


def test_widening_bf16_bits_is_exact() -> None:
    bits = torch.randn(64, 8).to(torch.bfloat16)
    assert (widen(bits.view(torch.uint16).numpy()) == bits.to(torch.float32).numpy()).all()
