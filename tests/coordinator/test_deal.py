from hypothesis import given
from hypothesis import strategies as st

from evrun.coordinator.deal import POLICIES, deal

policies = st.sampled_from(sorted(POLICIES))
ids = st.lists(st.integers(0, 400), min_size=1, max_size=64)
live = st.sets(st.integers(0, 9), min_size=1, max_size=8)


def test_one_token_over_four_ranks_gives_two_two_one_one() -> None:
    dealt = deal([128, 137, 155, 206, 251, 277], range(4), "sorted")
    assert dealt == {0: [128, 251], 1: [137, 277], 2: [155], 3: [206]}


def test_home_keeps_an_expert_on_its_rank() -> None:
    assert deal([5, 8, 9, 13], range(4), "home") == {0: [8], 1: [5, 9, 13]}
    assert deal([5, 9], [0, 2], "home") == {2: [5, 9]}


@given(ids, live, policies)
def test_every_expert_once_and_only_on_live_ranks(ids: list[int], live: set[int], policy: str) -> None:
    dealt = deal(ids, sorted(live), policy)
    assert sorted(e for share in dealt.values() for e in share) == sorted(set(ids))
    assert set(dealt) <= live
    assert list(dealt) == sorted(dealt)
    assert all(share and share == sorted(share) for share in dealt.values())


@given(ids, live, policies, st.randoms())
def test_order_and_repetition_do_not_matter(ids: list[int], live: set[int], policy: str, random) -> None:  # type: ignore[no-untyped-def]
    shuffled = ids * 2
    random.shuffle(shuffled)
    assert deal(shuffled, sorted(live), policy) == deal(ids, sorted(live), policy)


@given(ids, live)
def test_sorted_is_balanced(ids: list[int], live: set[int]) -> None:
    sizes = [len(s) for s in deal(ids, sorted(live), "sorted").values()] + [0] * (len(live) - len(set(ids)))
    assert max(sizes) - min(sizes) <= 1
