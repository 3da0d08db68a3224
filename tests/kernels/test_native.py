"""What the native backend computes: every variant of this machine against the references, and in which order it adds."""

from __future__ import annotations

import native_cases as cases
import numpy as np
import pytest

from evrun.kernels import formats, reference
from evrun.kernels.api import BadScaleError, Dtype, FfnShape, Numerics, Row

BOTH_NUMERICS = pytest.mark.parametrize("numerics", ["reference", "weights-only"])
BOTH_DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
VARIANTS = pytest.mark.parametrize("variant", cases.VARIANTS)

SIZES = [(32, 32), (96, 160), (512, 256), (288, 544)]
"""(H, I): one group; tails of 3 and 5 groups; whole blocks; blocks and a tail."""
TOKENS = [1, 2, 3, 19, 70]


def shape_of(numerics: Numerics = "reference", dtype: Dtype = "bfloat16", hidden: int = 96, intermediate: int = 160) -> FfnShape:
    return FfnShape(hidden, intermediate, 2.5, numerics, dtype)


@VARIANTS
@BOTH_NUMERICS
@BOTH_DTYPES
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_agrees_with_the_torch_reference(variant: str, numerics: Numerics, dtype: Dtype, hidden: int, intermediate: int) -> None:
    shape = shape_of(numerics, dtype, hidden, intermediate)
    for tokens in TOKENS:
        case = cases.random_case(shape, tokens, seed=tokens)
        truth = reference.create(shape, tokens, 3, 1)
        for combine in ("partial", "exact"):
            expected = cases.loaded(case.run(truth, combine))
            got = cases.loaded(case.run(case.create(variant=variant), combine))
            error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
            if dtype == "bfloat16":
                # Where a sum of fp32 falls on either side of a rounding step, an input of w2 differs, and with it a whole row a little.
                assert np.median(np.mean(got != expected, axis=1)) < 0.05
                assert error < 2e-3
            else:
                # An E4M3 code of w2's input moves where its fp32 value lies on a rounding step.
                assert error < (2e-6 if numerics == "weights-only" else 2e-3)


@VARIANTS
@BOTH_NUMERICS
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_float32_is_close_to_float64(variant: str, numerics: Numerics, hidden: int, intermediate: int) -> None:
    shape = shape_of(numerics, "float32", hidden, intermediate)
    for tokens in TOKENS:
        case = cases.random_case(shape, tokens, seed=tokens)
        expected = cases.per_pair(case, cases.double_linear, cases.double_silu)
        got = case.run(case.create(variant=variant), "exact")
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert error < (1e-6 if numerics == "weights-only" else 2e-3)
        per_row = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert np.median(per_row) < 7e-7


def defined_linear(x: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The dot product that csrc/layout.h defines, for x that E4M3 can hold."""
    n, k = codes.shape[0], x.shape[1]
    padded = -(-k // 256) * 256
    w = np.zeros((n, padded))
    w[:, :k] = formats.dequantise_fp4_rows(codes, scales)
    v = np.zeros((len(x), padded))
    v[:, :k] = x
    sums = np.einsum("tgk,ngk->tng", v.reshape(len(x), -1, 32), w.reshape(n, -1, 32)).astype(np.float32)  # exact in fp64
    lanes = np.zeros((len(x), n, 8), np.float32)
    for start in range(0, sums.shape[2], 8):
        lanes += sums[:, :, start : start + 8]
    pairs = lanes[:, :, ::2] + lanes[:, :, 1::2]
    fours = pairs[:, :, :2] + pairs[:, :, 2:]
    return fours[:, :, 0] + fours[:, :, 1]


def fp32_silu(g: np.ndarray) -> np.ndarray:
    return g / (np.float32(1) + np.exp(-g.astype(np.float64)).astype(np.float32))


@VARIANTS
@BOTH_DTYPES
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_adds_in_the_defined_order(variant: str, dtype: Dtype, hidden: int, intermediate: int) -> None:
    for tokens in TOKENS:
        case = cases.random_case(shape_of("reference", dtype, hidden, intermediate), tokens, seed=tokens)
        got = cases.loaded(case.run(case.create(variant=variant), "exact"))
        np.testing.assert_array_equal(got, cases.per_pair(case, defined_linear, fp32_silu))


@BOTH_NUMERICS
@BOTH_DTYPES
@pytest.mark.parametrize("combine", ["partial", "exact"])
def test_variants_and_thread_counts_give_the_same_bits(numerics: Numerics, dtype: Dtype, combine: str) -> None:
    for tokens in (1, 4, 19):
        case = cases.random_case(shape_of(numerics, dtype, 512, 320), tokens, seed=tokens)
        first = case.run(case.create(), combine)
        for variant in cases.VARIANTS:
            for threads in (1, 2, 3):
                backend = case.create(threads, variant, max_tokens=tokens + 9)
                for _ in range(2):
                    np.testing.assert_array_equal(case.run(backend, combine), first, err_msg=f"{variant}, {threads} threads")


@BOTH_NUMERICS
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
@pytest.mark.parametrize("scales", [(117, 123), (0, 254)])
def test_variants_give_the_same_bits_at_tails_and_extreme_scales(
    numerics: Numerics, hidden: int, intermediate: int, scales: tuple[int, int]
) -> None:
    """Token counts on both sides of every way through a kernel: one, two, a few, a whole batch, more than one holds."""
    shape = shape_of(numerics, "float32", hidden, intermediate)
    row = cases.random_row(np.random.default_rng(3), hidden, intermediate, *scales)
    for tokens in (1, 2, 3, 7, 64, 65, 130):
        case = cases.random_case(shape, tokens, seed=tokens, experts=1, top_k=1, mine=[0])
        case.rows = [row]
        results = {variant: case.run(case.create(variant=variant), "exact") for variant in cases.VARIANTS}
        for variant, got in results.items():
            np.testing.assert_array_equal(got, results["scalar"], err_msg=f"{variant}, {tokens} tokens")


@VARIANTS
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_largest_value_that_rounds_up_to_the_next_power_of_two(variant: str, tokens: int) -> None:
    """Its steps are one more than the digits hold; then they are twice as wide."""
    case = cases.random_case(shape_of("weights-only", "float32"), tokens, experts=1, top_k=1, mine=[0])
    case.x[:, ::32] = np.nextafter(np.float32(2), np.float32(0))
    case.x[:, 1::32] = -np.nextafter(np.float32(2), np.float32(0))
    expected = cases.per_pair(case, cases.double_linear, cases.double_silu)
    got = case.run(case.create(variant=variant), "exact")
    assert np.linalg.norm(got - expected) < 1e-6 * np.linalg.norm(expected)


@VARIANTS
@BOTH_NUMERICS
def test_a_row_does_not_depend_on_the_tokens_and_experts_beside_it(variant: str, numerics: Numerics) -> None:
    case = cases.random_case(shape_of(numerics, "float32", 512, 288), 67)
    backend = case.create(2, variant)
    together = case.run(backend)
    for group in ([0], [5, 66], [1, 2, 3], list(range(40))):
        np.testing.assert_array_equal(case.of_tokens(group).run(backend), together[group])
    exact = case.run(backend, "exact")
    done = 0
    for expert, row in zip(case.experts, case.rows, strict=True):
        alone = cases.Case(case.shape, case.x, case.ids, case.weights, [expert], [row])
        np.testing.assert_array_equal(alone.run(backend, "exact"), exact[done : done + alone.pairs])
        done += alone.pairs
    assert done == case.pairs


@VARIANTS
def test_partial_is_the_sum_of_the_exact_rows(variant: str) -> None:
    case = cases.random_case(shape_of(), 9)
    backend = case.create(variant=variant)
    rows, partial = cases.loaded(case.run(backend, "exact")), case.run(backend)
    expected = np.zeros_like(partial)
    done = 0
    for expert in case.experts:
        for token in np.nonzero(case.ids == expert)[0]:
            expected[token] += rows[done]
            done += 1
    np.testing.assert_array_equal(partial, expected)


@VARIANTS
def test_more_pairs_than_one_batch_holds(variant: str) -> None:
    case = cases.random_case(shape_of("reference", "float32"), 80, experts=8, top_k=6, mine=range(8))
    together = case.run(case.create(2, variant))
    for token in (0, 41, 79):
        np.testing.assert_array_equal(case.of_tokens([token]).run(case.create(variant=variant)), together[[token]])


@VARIANTS
@pytest.mark.parametrize("tokens", [1, 5])
def test_every_token_on_one_expert(variant: str, tokens: int) -> None:
    case = cases.random_case(shape_of("weights-only", "float32"), tokens, experts=1, top_k=1, mine=[0])
    expected = cases.per_pair(case, cases.double_linear, cases.double_silu)
    np.testing.assert_allclose(case.run(case.create(variant=variant)), expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@VARIANTS
@BOTH_NUMERICS
@pytest.mark.parametrize("tokens", [1, 2])
def test_every_code_byte_at_every_place(variant: str, numerics: Numerics, tokens: int) -> None:
    shape = shape_of(numerics, "float32", 512, 512)
    case = cases.random_case(shape, tokens, experts=1, top_k=1, mine=[0])
    places = np.arange(256, dtype=np.uint8)[:, None] + np.arange(256, dtype=np.uint8)[None]  # each byte once a column
    codes = np.concatenate([places, places[::-1]])
    case.rows = [case.rows[0]._replace(w1=codes, w3=codes[::-1].copy(), w2=codes)]
    expected = cases.per_pair(case, cases.double_linear, cases.double_silu)
    got = case.run(case.create(variant=variant), "exact")
    tolerance = 2e-6 if numerics == "weights-only" else 2e-3  # as above: a code of w2's input may move
    assert np.linalg.norm(got - expected) < tolerance * np.linalg.norm(expected)


@VARIANTS
@BOTH_NUMERICS
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("byte", [0, 1, 2, 20, 60, 190, 240, 254])
def test_extreme_scales(variant: str, numerics: Numerics, tokens: int, byte: int) -> None:
    """A whole w2 at one extreme scale, its input scaled against it: nothing is flushed, nothing overflows on the way."""
    shape = shape_of(numerics, "float32")
    case = cases.random_case(shape, tokens, experts=1, top_k=1, mine=[0])
    scales = np.full_like(case.rows[0].s2, byte)
    case.rows = [case.rows[0]._replace(s2=scales)]
    exponent = 127 - byte
    case.weights[:] *= np.float32(np.ldexp(1.0, max(-60, min(60, exponent))))
    expected = cases.per_pair(case, cases.double_linear, cases.double_silu)
    got = case.run(case.create(variant=variant), "exact").astype(np.float64)
    finite = np.abs(expected) < np.finfo(np.float32).max
    assert np.isfinite(got[finite]).all()
    # Half a unit of the smallest subnormal, beside the usual fp32 error.
    np.testing.assert_allclose(got[finite], expected[finite], rtol=0, atol=2e-6 * np.abs(expected).max() + 2.0**-149)


@VARIANTS
@pytest.mark.parametrize("tokens", [1, 3])
def test_byte_0_is_a_subnormal_beside_ordinary_scales(variant: str, tokens: int) -> None:
    shape = shape_of("weights-only", "float32", 256, 256)
    case = cases.random_case(shape, tokens, experts=1, top_k=1, mine=[0])
    row = case.rows[0]
    s2 = row.s2.copy()
    s2[::2] = 0  # whole rows: 2^-127
    s2[1::2, 3] = 0  # one group of a row
    case.rows = [row._replace(s2=s2)]
    case.weights[:] = np.float32(2.0**20)
    expected = cases.per_pair(case, cases.double_linear, cases.double_silu)
    got = case.run(case.create(variant=variant), "exact").astype(np.float64)
    assert (got[:, ::2] != 0).all()
    for rows in (slice(0, None, 2), slice(1, None, 2)):
        np.testing.assert_allclose(got[:, rows], expected[:, rows], rtol=0, atol=1e-6 * np.abs(expected[:, rows]).max())


@VARIANTS
@pytest.mark.parametrize("tokens", [1, 4])
def test_scales_of_every_byte_mixed(variant: str, tokens: int) -> None:
    """Sums range over 250 binades: each row is as good as its largest terms allow."""
    shape = shape_of("weights-only", "float32", 512, 96)
    case = cases.random_case(shape, tokens, experts=1, top_k=1, mine=[0])
    rng = np.random.default_rng(1)
    s2 = rng.integers(0, 255, case.rows[0].s2.shape, dtype=np.uint8)
    case.rows = [case.rows[0]._replace(s2=s2)]
    case.weights[:] = np.float32(2.0**-24)
    expected = cases.per_pair(case, cases.double_linear, cases.double_silu)
    got = case.run(case.create(variant=variant), "exact").astype(np.float64)
    largest = np.abs(expected)
    fits = largest < np.finfo(np.float32).max
    terms = np.exp2(s2.max(axis=1).astype(np.float64) - 127) * 2.0**-24 * 100
    assert (np.abs(got - expected)[fits] <= np.broadcast_to(1e-6 * terms + 2.0**-149, got.shape)[fits]).all()


@VARIANTS
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(("tensor", "expert", "row"), [("w1", 0, 159), ("w3", 1, 0), ("w2", 1, 95)])
def test_scale_byte_255_is_refused_where_it_is(variant: str, tokens: int, tensor: str, expert: int, row: int) -> None:
    case = cases.random_case(shape_of(), tokens, experts=3, top_k=3, mine=range(3))
    backend = case.create(2, variant)
    good = case.run(backend)
    field = f"s{tensor[1]}"
    scales = getattr(case.rows[expert], field).copy()
    scales[row, 2] = 255
    rows = list(case.rows)
    rows[expert] = rows[expert]._replace(**{field: scales})
    worse = rows[2].s3.copy()
    worse[1, 1] = 255  # a later expert: the first fault is the one that is named
    rows[2] = rows[2]._replace(s3=worse)
    with pytest.raises(BadScaleError) as caught:
        backend.call(case.x, case.ids, case.weights, case.experts, rows, case.out("partial"), "partial")
    assert (caught.value.expert, caught.value.tensor, caught.value.row) == (expert, tensor, row)
    np.testing.assert_array_equal(case.run(backend), good)  # it serves on


@VARIANTS
def test_an_unused_expert_is_not_looked_at(variant: str) -> None:
    case = cases.random_case(shape_of(), 2, experts=3, top_k=1, mine=[0, 2])
    case.ids[:] = 2
    bad = Row(*(np.full_like(array, 255) for array in case.rows[0]))
    case.rows = [bad, case.rows[1]]
    assert np.isfinite(case.run(case.create(variant=variant))).all()


@VARIANTS
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_without_work_a_partial_is_zero(variant: str, tokens: int) -> None:
    case = cases.random_case(shape_of(), tokens)
    case.ids[:] = 2  # another rank's
    backend = case.create(variant=variant)
    assert case.pairs == 0
    np.testing.assert_array_equal(case.run(backend), np.zeros((tokens, 96), np.float32))
    assert case.run(backend, "exact").shape == (0, 96)


@VARIANTS
@BOTH_NUMERICS
@BOTH_DTYPES
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_in_its_token_only(variant: str, numerics: Numerics, dtype: Dtype, value: float) -> None:
    case = cases.random_case(shape_of(numerics, dtype), 4)
    clean = case.run(case.create(variant=variant))
    x = cases.loaded(case.x).copy()
    x[1, 50] = value
    x[2, 95] = value
    case.x = cases.stored(x, case.shape)
    got = case.run(case.create(variant=variant))
    assert np.isnan(got[1:3]).all()
    np.testing.assert_array_equal(got[[0, 3]], clean[[0, 3]])


@VARIANTS
@BOTH_NUMERICS
@BOTH_DTYPES
def test_zero_and_tiny_tokens(variant: str, numerics: Numerics, dtype: Dtype) -> None:
    case = cases.random_case(shape_of(numerics, dtype), 3)
    x = cases.loaded(case.x).copy()
    x[0] = 0
    x[1] *= np.float32(2.0**-120)
    case.x = cases.stored(x, case.shape)
    got = case.run(case.create(variant=variant))
    assert not got[0].any()
    expected = case.run(reference.create(case.shape, 3, 3, 1))
    np.testing.assert_allclose(got, expected, rtol=0, atol=max(2e-3 * np.abs(expected[2]).max(), 1e-30))


def test_the_processor_state_of_the_caller_does_not_matter() -> None:
    torch = pytest.importorskip("torch")
    case = cases.random_case(shape_of("weights-only", "float32"), 1, experts=1, top_k=1, mine=[0])
    case.rows = [case.rows[0]._replace(s2=np.zeros_like(case.rows[0].s2))]
    case.weights[:] = np.float32(2.0**-10)  # results are subnormal
    expected = case.run(case.create())
    assert expected.any()
    assert (np.abs(expected) < 2.0**-126).all()
    torch.set_flush_denormal(True)
    try:
        got = case.run(case.create())
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("full_width", [(5120, 2304)])
def test_full_width_against_the_torch_reference(full_width: tuple[int, int]) -> None:
    hidden, intermediate = full_width
    shape = FfnShape(hidden, intermediate, 10.0, "reference", "bfloat16")
    rng = np.random.default_rng(4)
    row = cases.random_row(rng, hidden, intermediate, 118, 122)
    x = cases.stored(rng.standard_normal((9, hidden)).astype(np.float32), shape)
    case = cases.Case(shape, x, np.zeros((9, 1), np.int32), np.full((9, 1), 0.25, np.float32), [0], [row])
    expected = cases.loaded(case.run(reference.create(shape, 9, 1, 1), "exact"))
    backend = case.create(2)
    got = cases.loaded(case.run(backend, "exact"))
    steps = np.abs(got.view(np.int32) - expected.view(np.int32)) >> 16  # of bf16
    assert np.mean(steps != 0) < 1e-3
    assert steps[np.abs(expected) > 1e-2 * np.abs(expected).max()].max() <= 1
    alone = np.concatenate([cases.loaded(case.of_tokens([t]).run(backend, "exact")) for t in range(9)])
    np.testing.assert_array_equal(alone, got)
