"""Parts of the model on their own, against the values that the model's specification states."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evrun.coordinator.models.deepseek_v41 import linear
from evrun.coordinator.models.deepseek_v41.arithmetic import Arithmetic
from evrun.coordinator.models.deepseek_v41.engram import gate
from evrun.coordinator.models.deepseek_v41.gate import Gate
from evrun.coordinator.models.deepseek_v41.hyper_connection import HyperConnection, Mix, collapse, expand, sinkhorn
from evrun.coordinator.models.deepseek_v41.indexer import candidate_mask
from evrun.coordinator.models.deepseek_v41.linear import GroupedLinear, Linear, PackedWeight, PlainWeight, pieces
from evrun.coordinator.models.deepseek_v41.norm import RmsNorm
from evrun.coordinator.models.deepseek_v41.rope import compressed_frequencies, rotate_, rotation, window_frequencies, yarn_range
from evrun.coordinator.models.deepseek_v41.selection import chosen_positions, merge, rank
from evrun.coordinator.models.deepseek_v41.shared_expert import SharedExpert
from evrun.coordinator.models.deepseek_v41.sparse_attention import attend
from evrun.coordinator.models.deepseek_v41.state import state_bytes
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.errors import UsageError
from evrun.kernels import native
from evrun.launch.export import geometry

EXACT = Arithmetic.named("float32", "weights-only")
ROUNDED = Arithmetic.named("bfloat16", "reference")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def release() -> ModelConfig:
    return geometry.make_config(geometry.values("release"), 99092)


def close(found: Tensor, wanted: object, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(found, torch.as_tensor(wanted, dtype=torch.float32), atol=tolerance, rtol=0)


def plain(weight: Tensor, arithmetic: Arithmetic = EXACT) -> Linear:
    return Linear(PlainWeight(weight), arithmetic)


# RMSNorm


def test_rms_norm_has_its_tiny_eps_and_adds_no_one() -> None:
    norm = RmsNorm(torch.tensor([1.0, 2.0, 0.0, -1.0]).bfloat16(), 1e-20, EXACT)
    x = torch.tensor([[3e-7, 4e-7, 0.0, 0.0]])
    close(norm(x), [[1.2, 3.2, 0.0, 0.0]])
    assert norm(torch.zeros(1, 4)).tolist() == [[0, 0, 0, 0]]


def test_rms_norm_rounds_once() -> None:
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(64).bfloat16()
    wide = x.double()
    wanted = (wide / wide.square().mean(-1, keepdim=True).sqrt() * weight.double()).bfloat16()
    difference = (RmsNorm(weight, 1e-20, ROUNDED)(x).float() - wanted.float()).abs()
    assert difference.max() <= 2.0**-8 * wanted.float().abs().max()
    assert (difference == 0).float().mean() > 0.98


# hyper-connections


def test_expand_sums_over_the_first_index() -> None:
    y = torch.tensor([[0.5, -1.25, 2, 0.75]])
    post = torch.tensor([[0.25, -0.5, 1.75]])
    comb = torch.tensor([[[0.1, 0.2, -0.3], [0.4, -0.5, 0.6], [-0.7, 0.8, 0.9]]])
    streams = torch.tensor([[[1.25, -2, 0.5, 3], [-4, 0.75, 2.5, -1.5], [0.125, 5, -3, 2]]])
    wanted = [[-1.4375, -3.7125, 3.65, -1.5125], [2.1, 3.85, -4.55, 2.575], [-1.7875, 3.3625, 2.15, 1.3125]]
    close(expand(y, streams, Mix(post, post, comb))[0], wanted)
    wrong = expand(y, streams, Mix(post, post, comb.transpose(1, 2)))[0, 0]
    close(wrong, [-0.5875, -1.8625, 1.95, -0.4125])


def test_expand_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    mix = Mix(torch.randn(7, 3), torch.randn(7, 3), torch.randn(7, 3, 3))
    y, streams = torch.randn(7, 8), torch.randn(7, 3, 8)
    whole = expand(y, streams, mix)
    monkeypatch.setattr("evrun.coordinator.models.deepseek_v41.hyper_connection.EXPAND_ELEMENTS", 2 * 3 * 3 * 8)
    assert torch.equal(expand(y, streams, mix), whole)


def tiny_mix(n: int = 4) -> HyperConnection:
    config = dataclasses.replace(release(), hc_mult=n)
    scale = torch.tensor([0.5, 1, 2])
    size = 2 * n + n * n
    base = 0.1 * (torch.arange(size) % 5) - 0.2
    return HyperConnection(torch.randn(size, n * 32), base, scale, config)


def test_mix_vector() -> None:
    i = torch.arange(24)
    m = ((-1.0) ** i * 0.25 * (i % 7))[None]
    scale = torch.tensor([0.5] * 4 + [1.0] * 4 + [2.0] * 16)
    mix = tiny_mix().from_logits(m * scale + 0.1 * (i % 5) - 0.2)
    close(mix.pre[0], [0.450167, 0.443987, 0.562178, 0.431681])
    close(mix.post[0], [1.537050, 0.380003, 1.604368, 1.0])
    close(mix.comb[0], [[0.097246, 0.428763, 0.300153, 0.173837], [0.431284, 0.034837, 0.066276, 0.467603],
                        [0.113699, 0.184425, 0.578592, 0.123283], [0.357770, 0.351974, 0.054979, 0.235276]])  # fmt: skip
    close(mix.comb[0].sum(0), [0.999999] * 4)
    close(mix.comb[0].sum(1), [0.999999] * 4)


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_mix_statistic_runs_over_all_streams(n: int) -> None:
    """m is linear in the direction of the streams and does not feel their common size."""
    mix = tiny_mix(n)
    streams = torch.randn(3, n, 32)
    a, b = mix(streams), mix(streams * 1e-6)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
    uneven = streams.clone()
    uneven[:, 0] *= 2
    assert n == 1 or (mix(uneven).post - a.post).abs().max() > 1e-3


def test_sinkhorn_ends_with_the_columns() -> None:
    logits = torch.randn(2, 4, 4) * 3
    c = logits.double().softmax(-1) + 1e-6
    c = c / (c.sum(1, keepdim=True) + 1e-6)
    for _ in range(19):
        c = c / (c.sum(2, keepdim=True) + 1e-6)
        c = c / (c.sum(1, keepdim=True) + 1e-6)
    close(sinkhorn(logits, 20, 1e-6), c.float())
    assert (sinkhorn(logits, 1, 1e-6).sum(1) - 1).abs().max() < 1e-3
    assert (sinkhorn(logits, 1, 1e-6).sum(2) - 1).abs().max() > 1e-2


def test_collapse() -> None:
    streams = torch.tensor([[[1.0, 2.0], [10.0, 20.0]]])
    close(collapse(streams, torch.tensor([[1.0, 0.5]]), EXACT), [[6.0, 12.0]])


def test_constants_of_the_release() -> None:
    c = release()
    assert torch.tensor(c.index_head_dim**-0.5 * c.index_n_heads**-0.5).item() == 2.0**-6
    assert (2 * c.hc_mult + c.hc_mult**2, c.hc_mult * c.hidden_size) == (24, 20480)
    assert math.isclose(c.head_dim**-0.5, 0.04419417382, rel_tol=1e-9)
    per_token = state_bytes(c, 3_000_000) - state_bytes(c, 1_000_000)
    assert per_token == 2_000_000 * 3200
    assert state_bytes(c, 0) == 5_242_880 + 3 * 4096


# RoPE


def test_frequencies_of_the_release() -> None:
    window, compressed = window_frequencies(release()), compressed_frequencies(release())
    assert window.shape == compressed.shape == (32,)
    for index, value in {0: 1.0, 1: 0.749894202, 16: 0.01, 31: 1.33352145e-4}.items():
        assert math.isclose(window[index], value, rel_tol=1e-6)
    wanted = {0: 1.0, 1: 0.687656045, 15: 0.00363553851, 16: 0.00226562493, 20: 2.96977785e-4, 24: 1.95312532e-5, 25: 5.37231244e-6,
              31: 5.6805294e-7}  # fmt: skip
    for index, value in wanted.items():
        assert math.isclose(compressed[index], value, rel_tol=1e-6), index
    assert yarn_range(160000, 64, release().rope_scaling) == (15, 25)


def test_yarn_of_another_width_stays_inside() -> None:
    scaling = dataclasses.replace(release().rope_scaling, original_max_position_embeddings=8, beta_fast=32, beta_slow=1e-9)
    assert yarn_range(10000, 16, scaling) == (0, 15)
    narrow = dataclasses.replace(scaling, beta_fast=1, beta_slow=1, original_max_position_embeddings=6)
    assert yarn_range(10000, 16, narrow) == (0, 0.001)


def test_rotation_turns_adjacent_pairs_of_the_last_channels() -> None:
    x = torch.arange(1, 9, dtype=torch.float32)[None].repeat(3, 1)
    turns = rotation(torch.tensor([0, 1, 5]), torch.tensor([0.5, 0.25]))
    found = rotate_(x.clone(), turns)
    for row, position in enumerate((0, 1, 5)):
        wanted = list(range(1, 5))
        for first, frequency in ((5, 0.5), (7, 0.25)):
            angle = position * frequency
            wanted += [first * math.cos(angle) - (first + 1) * math.sin(angle), first * math.sin(angle) + (first + 1) * math.cos(angle)]
        close(found[row], wanted)
    close(rotate_(found.clone(), turns.conj()), x)
    heads = rotate_(x[:, None].repeat(1, 2, 1), turns)
    assert torch.equal(heads[:, 0], found)
    assert torch.equal(heads[:, 1], found)


def test_rotation_writes_back_in_its_dtype() -> None:
    x = torch.randn(2, 8).bfloat16()
    wide = rotate_(x.float(), rotation(torch.tensor([3, 4]), torch.tensor([0.5, 0.25])))
    assert torch.equal(rotate_(x, rotation(torch.tensor([3, 4]), torch.tensor([0.5, 0.25]))), wide.bfloat16())


# linears


@pytest.mark.parametrize("elements", [1, 32 * 96, 70 * 96, 1 << 20])
def test_packed_and_expanded_weights_give_the_same_bits(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evrun.coordinator.models.deepseek_v41.linear.PIECE_ELEMENTS", elements)
    rng = np.random.default_rng(0)
    codes = torch.from_numpy(rng.integers(0, 127, (144, 96), np.uint8))
    scales = torch.from_numpy(rng.integers(110, 120, (5, 3), np.uint8))
    packed = PackedWeight(codes, scales)
    expanded = packed.to_bfloat16()
    assert packed.shape == expanded.shape == (144, 96)
    spread = torch.exp2(scales.float() - 127).repeat_interleave(32, 0).repeat_interleave(32, 1)[:144]
    whole = codes.view(torch.float8_e4m3fn).float() * spread
    assert torch.equal(torch.cat([packed.rows(*r).clone() for r in pieces(packed.shape)]), whole)
    x = torch.randn(5, 96)
    assert torch.equal(Linear(packed, EXACT)(x), Linear(expanded, EXACT)(x))
    close(Linear(packed, EXACT)(x), x @ whole.T, 1e-2)
    for groups in (1, 2, 3):
        grouped = torch.randn(4, groups * 96)
        found = GroupedLinear(packed, groups, EXACT)(grouped)
        assert torch.equal(found, GroupedLinear(expanded, groups, EXACT)(grouped))
        wanted = torch.einsum("tgk,gnk->tgn", grouped.view(4, groups, 96), whole.view(groups, -1, 96)).flatten(1)
        close(found, wanted, 1e-2)


def test_without_the_native_library_torch_expands_weights_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codes, scales = (torch.from_numpy(np.random.default_rng(1).integers(*r, np.uint8)) for r in ((0, 127, (96, 64)), (110, 120, (3, 2))))
    wanted = PackedWeight(codes, scales).rows(32, 96).clone()

    def missing() -> native.Dequantise:
        raise native.NativeLibraryError("not built")

    monkeypatch.setattr(native, "dequantiser", missing)
    linear.host_dequantiser.cache_clear()
    try:
        assert torch.equal(PackedWeight(codes, scales).rows(32, 96), wanted)
    finally:
        linear.host_dequantiser.cache_clear()
    assert "expanded by torch, in about three times the time: not built" in caplog.text


def test_inputs_are_rounded_only_in_reference_numerics() -> None:
    x = torch.tensor([[1.0, 0.3, *[0.0] * 30]])
    assert EXACT.linear_input(x)[0, :2].tolist() == x[0, :2].tolist()
    assert Arithmetic.named("float32", "reference").linear_input(x)[0, :2].tolist() == [1.0, 0.3125]


@pytest.mark.parametrize(("dtype", "numerics"), [("float16", "reference"), ("bfloat16", "exact")])
def test_unknown_arithmetic_is_refused_with_the_known_names(dtype: str, numerics: str) -> None:
    with pytest.raises(UsageError, match=r"expected one of .*float32|expected one of reference, weights-only"):
        Arithmetic.named(dtype, numerics)


# router and shared expert


def router(scores: list[float], bias: list[float], top_k: int, scaling: float = 1.5) -> tuple[Tensor, Tensor]:
    """Route one token whose logits are these."""
    return Gate(torch.tensor(scores)[:, None], torch.tensor(bias), top_k, scaling)(torch.ones(1, 1))


def test_router_scores() -> None:
    """With one expert per score and scaling 1 the weights are the scores over their sum."""
    ids, weights = router([0.0, 1.0, -2.0], [0, 0, 0], 3)
    assert ids.tolist() == [[1, 0, 2]]
    assert ids.dtype == torch.int32
    total = 0.832555 + 1.145976 + 0.356270
    close(weights[0], [1.5 * s / total for s in (1.145976, 0.832555, 0.356270)])


def test_router_bias_chooses_and_does_not_weigh() -> None:
    ids, weights = router([0.0, 1.0, -2.0], [0, 0, 10], 2)
    assert ids.tolist() == [[2, 1]]
    close(weights[0], [1.5 * s / (0.356270 + 1.145976) for s in (0.356270, 1.145976)])


def test_router_ties_go_to_the_lower_id() -> None:
    ids, _ = router([0.5] * 40, [0.0] * 40, 6)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]]
    bias = [0.0] * 40
    bias[30] = bias[7] = 1.0
    assert router([0.5] * 40, bias, 4)[0].tolist() == [[7, 30, 0, 1]]


def test_router_in_the_far_range() -> None:
    _, weights = router([-200.0, -200.0, 60.0], [0, 0, 0], 3)
    assert torch.isfinite(weights).all()
    close(weights.sum(), 1.5)
    _, weights = router([-200.0] * 3, [0, 0, 0], 2)
    assert weights.tolist() == [[0, 0]]


def test_shared_expert_clamps() -> None:
    one = torch.ones(1, 1)
    for x, wanted in ((20.0, 1.5 / (1 + math.exp(-1.5)) * 1.5), (-20.0, -20 / (1 + math.exp(20)) * -1.5)):
        expert = SharedExpert(plain(one), plain(one), plain(one), 1.5, EXACT)
        close(expert(torch.tensor([[x]])), [[wanted]])


# Engram


def test_engram_gate() -> None:
    close(gate(torch.tensor([0.0, -0.0, 0.25, 4, -7.6398444])), [0.50025, 0.50025, 0.622459, 0.880797, 0.0592993])


# attention


def naive_attention(q: Tensor, keys: list[Tensor], sink: Tensor, scale: float) -> Tensor:
    """One query [H, d] over its own keys, in float64."""
    k = torch.stack(keys).double()
    weights = torch.exp(q.double() @ k.T * scale)
    return weights @ k / (weights.sum(-1) + sink.double().exp())[:, None]


@pytest.mark.parametrize(("window", "chosen"), [(5, 0), (5, 3), (60, 7), (64, 64), (70, 130)])
def test_attention_over_window_chosen_entries_and_sink(window: int, chosen: int) -> None:
    tokens, heads, width = 6, 3, 8
    q, entries, sink = torch.randn(tokens, heads, width), torch.randn(200, width).bfloat16(), torch.randn(heads)
    recent = torch.randn(window - 1 + tokens, width).bfloat16()
    rows = torch.arange(tokens)[:, None] + torch.arange(window)
    counts = torch.rand(tokens, window) < 0.7
    counts[:, -1] = True
    picks = torch.stack([torch.randperm(200)[:chosen] for _ in range(tokens)]) if chosen else torch.zeros(tokens, 0, dtype=torch.long)
    picks = torch.where(torch.rand(picks.shape) < 0.8, picks, -1)
    for arithmetic, tolerance in ((EXACT, 1e-5), (ROUNDED, 2e-2)):
        found = attend(arithmetic.round(q), recent, rows, counts, entries, picks, sink, width**-0.5, arithmetic).float()
        for t in range(tokens):
            keys = [recent[r] for r, c in zip(rows[t].tolist(), counts[t].tolist(), strict=True) if c]
            keys += [entries[i] for i in picks[t].tolist() if i >= 0]
            close(found[t], naive_attention(arithmetic.round(q[t]), keys, sink, width**-0.5).float(), tolerance)


def test_attention_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, entries, recent = torch.randn(9, 2, 8), torch.randn(20, 8).bfloat16(), torch.randn(12, 8).bfloat16()
    rows, counts = torch.arange(9)[:, None] + torch.arange(4), torch.ones(9, 4, dtype=torch.bool)
    arguments = (q, recent, rows, counts, entries, torch.randint(0, 20, (9, 6)), torch.zeros(2), 1.0, EXACT)
    whole = attend(*arguments)
    monkeypatch.setattr("evrun.coordinator.models.deepseek_v41.sparse_attention.GATHER_ELEMENTS", 2 * 10 * 8)
    close(attend(*arguments), whole, 1e-6)


def test_a_sink_can_take_everything() -> None:
    q, recent = torch.randn(1, 1, 8), torch.randn(1, 8).bfloat16()
    rows, counts, picks = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 0, dtype=torch.long)
    assert attend(q, recent, rows, counts, recent, picks, torch.tensor([200.0]), 1.0, EXACT).abs().max() == 0


# selection


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([-2.5, -1.0, -0.0, 0.0, 0.5, 3.0, math.inf]), st.booleans()), min_size=1, max_size=40),
       st.integers(1, 12), st.integers(1, 7))  # fmt: skip
def test_selection_is_a_stable_sort(items: list[tuple[float, bool]], count: int, piece: int) -> None:
    scores, valid = torch.tensor([[s for s, _ in items]]), torch.tensor([[v for _, v in items]])
    order = sorted((i for i, (_, v) in enumerate(items) if v), key=lambda i: (-items[i][0], i))
    wanted = sorted(order[:count])
    best = None
    for start in range(0, len(items), piece):
        part = slice(start, start + piece)
        positions = torch.arange(len(items))[None, part]
        best = merge(best, rank(scores[:, part], positions, valid[:, part]), count)
    assert best is not None
    assert chosen_positions(best, count).tolist() == [wanted + [-1] * (count - len(wanted))]


def test_rank_orders_all_finite_numbers() -> None:
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.integers(0, 2**32, 4000, dtype=np.uint32).view(np.float32).copy())
    values = values[torch.isfinite(values)]
    ranks = rank(values, torch.zeros(len(values), dtype=torch.long), torch.ones(len(values), dtype=torch.bool))
    assert torch.equal(values[ranks.argsort()], values.sort().values)


def test_candidate_mask_holds_whole_blocks() -> None:
    blocks = torch.tensor([[0, 2], [1, -1]])
    mask = candidate_mask(blocks, torch.tensor([7, 5]), 7, 3)
    assert mask.int().tolist() == [[1, 1, 1, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1, 0]]
    unrestricted = candidate_mask(None, torch.tensor([0, 1, 4]), 7, 3)
    assert unrestricted.int().tolist() == [[0] * 7, [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]]
