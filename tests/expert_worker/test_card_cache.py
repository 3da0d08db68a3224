import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evrun.expert_worker.card.cache import CardCache
from evrun.expert_worker.card.layout import lay_out, slot_bytes
from evrun.expert_worker.card.slot_table import SlotTable

LAYERS, EXPERTS = 4, 20
keys = st.tuples(st.integers(0, 3), st.integers(0, 9))


@given(st.integers(0, 6), st.lists(st.lists(keys, min_size=1, max_size=5, unique=True), max_size=40))
def test_never_larger_than_asked_and_every_row_in_its_own_slot(slots: int, calls: list[list[tuple[int, int]]]) -> None:
    cache = CardCache(slots, SlotTable(LAYERS, EXPERTS))
    where: dict[tuple[int, int], int] = {}
    for call in calls:
        used = set()
        for key in call:
            slot = cache.find(key)
            if slot is None:
                slot = cache.admit(key, set(call))
                if slot is None:
                    continue
                where = {k: s for k, s in where.items() if s != slot}
                where[key] = slot
            assert where[key] == slot
            assert slot not in used, "two rows of one call in one slot"
            used.add(slot)
        assert len(cache) <= slots
        assert all(k in cache for k in where)
        table = cache.table.slots
        assert {(layer, expert): int(table[layer, expert]) for layer, expert in np.argwhere(table >= 0).tolist()} == where
    assert cache.hits + cache.misses == (sum(map(len, calls)) if slots else 0)


@given(st.integers(1, 6), st.lists(keys, max_size=60))
def test_what_native_code_used_counts_as_found(slots: int, calls: list[tuple[int, int]]) -> None:
    """Two caches, one asked at every call, one that catches up before each row it has to bring in."""
    asked, told = CardCache(slots, SlotTable(LAYERS, EXPERTS)), CardCache(slots, SlotTable(LAYERS, EXPERTS))
    for key in calls:
        if asked.find(key) is None:
            told.catch_up()
            assert told.find(key) is None
            assert asked.admit(key, {key}) == told.admit(key, {key})
        else:
            table = told.table
            assert table.slots[key] >= 0
            table.used[table.num_used[0]] = key[0] * EXPERTS + key[1]
            table.num_used[0] += 1
        np.testing.assert_array_equal(asked.table.slots, told.table.slots)
    told.catch_up()
    assert (told.hits, told.misses, told.evictions) == (asked.hits, asked.misses, asked.evictions)
    assert told.table.num_used[0] == 0


def test_what_native_code_brought_in_for_one_call_is_a_miss_and_named() -> None:
    cache = CardCache(1, SlotTable(LAYERS, EXPERTS))
    cache.admit((0, 1), set())
    cache.table.used[:2], cache.table.num_used[0] = (1, 2), 2
    assert cache.catch_up() == [(0, 2)]
    assert (cache.hits, cache.misses) == (1, 1)
    assert cache.table.num_free[0] == 0
    cache.drop((0, 1))
    assert cache.table.num_free[0] == 1


def test_a_layers_expert_is_not_another_layers() -> None:
    cache = CardCache(2, SlotTable(LAYERS, EXPERTS))
    assert cache.admit((1, 5), set()) != cache.admit((2, 5), set())
    assert cache.find((3, 5)) is None


def test_frequent_rows_outlive_recent_ones() -> None:
    cache = CardCache(3, SlotTable(LAYERS, EXPERTS))
    for key in ((0, 0), (0, 1), (0, 2)):
        cache.admit(key, set())
    for _ in range(5):
        cache.find((0, 0))
    cache.find((0, 1))
    cache.find((0, 2))
    for new in range(10, 14):  # one-time rows pass through
        cache.admit((0, new), set())
        assert (0, 0) in cache or new > 11
    assert cache.evictions == 4


def test_rows_of_the_call_are_never_evicted_for_each_other() -> None:
    cache = CardCache(2, SlotTable(LAYERS, EXPERTS))
    call = {(0, 1), (0, 2), (0, 3)}
    assert cache.admit((0, 1), call) is not None
    assert cache.admit((0, 2), call) is not None
    assert cache.admit((0, 3), call) is None
    cache.drop((0, 1))
    assert cache.admit((0, 3), call) is not None


def tensor(shard: str, offset: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(shard=Path(shard), offset=offset, data=np.zeros(size, np.uint8))


def test_neighbours_travel_in_one_copy() -> None:
    sizes = [320, 20 * 16, 320, 320, 480, 160]
    offsets = np.cumsum([1000, *sizes])[:-1].tolist()
    layout = lay_out([tensor("a", o, s) for o, s in zip(offsets, sizes, strict=True)])  # type: ignore[arg-type]
    assert [(c.offset, c.size_bytes, c.to) for c in layout.copies] == [(1000, sum(sizes), 0)]
    assert list(layout.tensors) == [o - 1000 for o in offsets]


six = {"min_size": 6, "max_size": 6}


@given(st.permutations(range(6)), st.lists(st.sampled_from(["a", "b"]), **six), st.lists(st.integers(0, 2), **six))
def test_every_tensor_lands_whole_and_alone(order: list[int], shards: list[str], gaps: list[int]) -> None:
    sizes = [32 * n for n in (10, 3, 10, 3, 8, 2)]
    ends = {"a": 64, "b": 7}
    tensors: list[SimpleNamespace | None] = [None] * 6
    for i in order:
        shard = shards[i]
        ends[shard] += 32 * gaps[i]
        tensors[i] = tensor(shard, ends[shard], sizes[i])
        ends[shard] += sizes[i]
    layout = lay_out(tensors)  # type: ignore[arg-type]
    taken = sorted((place, place + size) for place, size in zip(layout.tensors, sizes, strict=True))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken))
    assert taken[-1][1] <= slot_bytes(sum(sizes))
    assert all(place % 16 == 0 for place in layout.tensors)
    for t, place in zip(tensors, layout.tensors, strict=True):
        copy = next(c for c in layout.copies if c.shard == t.shard and c.offset <= t.offset < c.offset + c.size_bytes)  # type: ignore[union-attr]
        assert copy.to + t.offset - copy.offset == place  # type: ignore[union-attr]
