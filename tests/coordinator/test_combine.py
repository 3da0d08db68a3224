import numpy as np
import pytest
import torch

from evrun.coordinator.combine import Share, combine_partials, combine_rows, widen
from evrun.coordinator.deal import deal
from evrun.expert_worker.wire import exchange

T, K, H, EXPERTS = 9, 3, 16, 12


@pytest.fixture(params=["native", "numpy"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test for both ways."""
    if request.param == "numpy":
        monkeypatch.setattr(exchange, "load", lambda: None)
    else:
        assert exchange.load(), "the native library was not built"
    return request.param


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
        assert combine_rows(arrived, routes, out)
        assert out.tobytes() == in_the_references_order(routes).tobytes()


def test_partials_add_in_rank_order_whoever_came_first() -> None:
    partials = [np.full((1, 1), v, np.float32) for v in (1e8, 1.0, -1e8)]
    shares = [Share(rank, [rank], p) for rank, p in enumerate(partials)]
    out = np.empty((1, 1), np.float32)
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        assert combine_partials([shares[i] for i in order], out)
        assert out[0, 0] == np.float32(np.float32(1e8) + np.float32(1.0)) + np.float32(-1e8)


def test_widening_bf16_bits_is_exact() -> None:
    bits = torch.randn(64, 8).to(torch.bfloat16)
    assert (widen(bits.view(torch.uint16).numpy()) == bits.to(torch.float32).numpy()).all()


def test_bf16_rows_add_up_as_their_fp32_values_do(routes: np.ndarray) -> None:
    shares, wide = [], []
    for rank, experts in deal(routes.ravel().tolist(), range(3), "sorted").items():
        bits = torch.from_numpy(np.concatenate([rows_of(routes, e) for e in experts])).bfloat16().view(torch.uint16).numpy()
        shares.append(Share(rank, experts, bits))
        wide.append(Share(rank, experts, widen(bits)))
    out, expected = np.empty((2, T, H), np.float32)
    assert combine_rows(shares, routes, out)
    assert combine_rows(wide, routes, expected)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_sum_that_is_not_finite_is_told(routes: np.ndarray, bad: float) -> None:
    out = np.empty((T, H), np.float32)
    partials = [Share(rank, [rank], np.ones((T, H), np.float32)) for rank in range(3)]
    partials[1].result[T - 1, H - 1] = bad
    assert not combine_partials(partials, out)
    experts = sorted(set(routes.ravel().tolist()))
    rows = np.concatenate([rows_of(routes, e) for e in experts])
    rows[0, 0] = bad
    assert not combine_rows([Share(0, experts, rows)], routes, out)
