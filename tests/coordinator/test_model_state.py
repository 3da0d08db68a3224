"""Decode state: prefill cut anywhere, and decode, give what one piece gives; what a state takes, and what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import golden
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steady import steady_sums
from torch import Tensor

from evrun.coordinator.models.deepseek_v41.state import State, state_bytes
from evrun.expert_worker.wire.errors import UsageError

SIZES = ([1], [3], [7], [13], [17], [33], [5, 1, 2, 30, 3])
FLOATS = ("fp32", "fp32noaq")
STEADY = 1e-5
"""With steady sums the rows are in fact the same to the bit; this leaves room for other hardware."""


def cut(total: int, sizes: Sequence[int]) -> list[int]:
    """Pieces of these sizes in turn, the last one cut to fit."""
    out, repeating = [], itertools.cycle(sizes)
    while total:
        out.append(min(next(repeating), total))
        total -= out[-1]
    return out


def tokens(name: str, variant: str, prompt: str, following: int = 0) -> list[int]:
    """The prompt and the first tokens of its recorded continuation."""
    wanted = golden.expected(name, variant, prompt)
    ids: list[int] = torch.cat([wanted["token_ids"], wanted["greedy_ids"][:following]]).tolist()
    return ids


def largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize(
    ("name", "prompt", "sizes"),
    [*[("minimal", "rand-24", s) for s in SIZES], *[("full", "mixed", s) for s in ([3], [13], [5, 1, 2, 30, 3])]],
)
def test_chunks(name: str, prompt: str, sizes: list[int]) -> None:
    ids = tokens(name, "fp32", prompt)
    with steady_sums():
        whole = golden.run(name, "fp32", ids)
        pieces = golden.run(name, "fp32", ids, (), cut(len(ids), sizes))
    assert largest(pieces.logits, whole.logits) <= STEADY


@pytest.mark.parametrize(("variant", "sizes"), [("fp32", [33]), ("fp32noaq", [50, 1, 2, 30, 3])])
def test_chunks_of_a_long_prompt(variant: str, sizes: list[int]) -> None:
    """The window turns several times, entries are dropped, the candidate pool leaves blocks out."""
    ids = tokens("long", variant, "rand-201")
    with steady_sums():
        whole = golden.run("long", variant, ids)
        pieces = golden.run("long", variant, ids, (), cut(len(ids), sizes))
    assert largest(pieces.logits, whole.logits) <= STEADY


@pytest.mark.long
@pytest.mark.parametrize("variant", FLOATS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("name", "prompt"), [(n, p) for n in golden.PROMPTS for p in golden.PROMPTS[n]])
def test_chunks_of_every_prompt(name: str, prompt: str, sizes: list[int], variant: str) -> None:
    ids = tokens(name, variant, prompt, 15)
    with steady_sums():
        whole = golden.run(name, variant, ids)
        pieces = golden.run(name, variant, ids, (), cut(len(ids), sizes))
    assert largest(pieces.logits, whole.logits) <= STEADY


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_chunks_anywhere(data: st.DataObject) -> None:
    ids = tokens("minimal", "fp32noaq", "rand-24")
    cuts = data.draw(st.sets(st.integers(1, len(ids) - 1), max_size=6).map(sorted))
    sizes = [b - a for a, b in itertools.pairwise([0, *cuts, len(ids)])]
    with steady_sums():
        whole = golden.run("minimal", "fp32noaq", ids)
        pieces = golden.run("minimal", "fp32noaq", ids, (), sizes)
    assert largest(pieces.logits, whole.logits) <= STEADY


@pytest.mark.parametrize("variant", FLOATS)
@pytest.mark.parametrize(("name", "prompt"), [*[("minimal", p) for p in golden.PROMPTS["minimal"]], ("full", "mixed"), ("full", "chat")])
def test_decode_is_prefill(name: str, prompt: str, variant: str) -> None:
    """With the sums as they come: the released reference's decode fails this beyond index_topk entries (spec 4.3)."""
    prompt_ids, ids = tokens(name, variant, prompt), tokens(name, variant, prompt, 15)
    whole = golden.run(name, variant, ids)
    steps = golden.run(name, variant, prompt_ids, ids[len(prompt_ids) :])
    assert largest(steps.logits, whole.logits) <= 1e-3


@pytest.mark.parametrize(("split", "variant"), [(40, "fp32noaq"), (151, "fp32")])
def test_decode_is_prefill_where_entries_are_dropped(split: int, variant: str) -> None:
    ids = tokens("long", variant, "text-long")[: split + 10]
    with steady_sums():
        whole = golden.run("long", variant, ids)
        steps = golden.run("long", variant, ids[:split], ids[split:])
    assert largest(steps.logits, whole.logits) <= STEADY
    for key in ("layers.1.index_topk", "layers.3.index_topk", "layers.5.index_topk"):
        rows, wanted = steps.decode[key], whole.prefill[key][split:]
        width = min(rows.shape[1], wanted.shape[1])
        assert torch.equal(rows[:, :width], wanted[:, :width])
        assert (rows[:, width:] == -1).all()
        assert (wanted[:, width:] == -1).all()


@pytest.mark.long
@pytest.mark.parametrize("variant", FLOATS)
@pytest.mark.parametrize(("name", "prompt"), [("full", "rand-61"), *[("long", p) for p in golden.PROMPTS["long"]]])
def test_decode_from_the_first_token_on(name: str, prompt: str, variant: str) -> None:
    ids = tokens(name, variant, prompt, 15)
    with steady_sums():
        whole = golden.run(name, variant, ids)
        steps = golden.run(name, variant, ids[:1], ids[1:])
    assert largest(steps.logits, whole.logits) <= STEADY


def test_bfloat16_in_chunks() -> None:
    """Nothing rounds twice and no cut loses a rounding: on this prompt even the bits are kept."""
    ids = tokens("minimal", "bf16", "rand-24")
    whole = golden.run("minimal", "bf16", ids)
    pieces = golden.run("minimal", "bf16", ids, (), [7, 8, 9])
    assert (pieces.logits - whole.logits).abs().amax(1).median() <= 0.6
    assert (pieces.logits.argmax(1) == whole.logits.argmax(1)).float().mean() >= 0.8


def test_two_sequences_do_not_meet() -> None:
    model, local = golden.model("full", "fp32"), golden.experts("full", "fp32")
    first, second = tokens("full", "fp32", "chat"), tokens("full", "fp32", "mixed")[:17]
    alone = [golden.run("full", "fp32", ids, (), [9, 8]).logits[-1] for ids in (first, second)]
    states = [model.new_state(20), model.new_state(20)]
    for state, ids in zip(states, (first, second), strict=True):
        model.forward(ids[:9], state, local)
    found = [model.forward(ids[9:], state, local)[0] for state, ids in zip(states, (first, second), strict=True)]
    torch.testing.assert_close(torch.stack(found), torch.stack(alone), atol=1e-4, rtol=0)


def test_logits_last_is_the_last_of_all() -> None:
    model, local = golden.model("full", "bf16"), golden.experts("full", "bf16")
    ids = tokens("full", "bf16", "chat")
    every = model.forward(ids, model.new_state(20), local, logits="all")
    last = model.forward(torch.tensor(ids), model.new_state(20), local)
    assert every.shape == (17, 512)
    assert last.shape == (1, 512)
    assert last.dtype == every.dtype == torch.float32
    torch.testing.assert_close(last[0], every[-1], atol=1e-5, rtol=0)
    last /= 2  # an ordinary tensor: its owner may change it


def held_bytes(state: State) -> int:
    tensors = [state.windows]
    for source in state.sources.values():
        tensors += [source.entries, source.keys, source.open]
    return sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("name", golden.PROMPTS)
@pytest.mark.parametrize("max_tokens", [1, 2, 15, 1000])
def test_state_bytes(name: str, max_tokens: int) -> None:
    model = golden.model(name, "fp32")
    assert model.state_bytes(max_tokens) == state_bytes(model.config, max_tokens) == held_bytes(model.new_state(max_tokens))


def test_a_full_state_refuses_more_and_stays_as_it_is() -> None:
    model, local = golden.model("minimal", "fp32"), golden.experts("minimal", "fp32")
    state = model.new_state(6)
    model.forward([1, 2, 3, 4], state, local)
    with pytest.raises(UsageError, match=r"holds 6 tokens, 4 seen \+ 3 new"):
        model.forward([5, 6, 7], state, local)
    assert state.position == 4
    again = model.forward([5, 6], state, local)
    fresh = model.new_state(6)
    model.forward([1, 2, 3, 4], fresh, local)
    assert torch.equal(model.forward([5, 6], fresh, local), again)


@pytest.mark.parametrize("ids", [[-1], [3, 512], [10**9]])
def test_ids_outside_the_vocabulary(ids: list[int]) -> None:
    model = golden.model("minimal", "fp32")
    state = model.new_state(6)
    with pytest.raises(UsageError, match="0 to 511 expected"):
        model.forward(ids, state, golden.experts("minimal", "fp32"))
    assert state.position == 0


def test_no_token_is_refused() -> None:
    model = golden.model("minimal", "fp32")
    with pytest.raises(UsageError, match="at least one token"):
        model.forward([], model.new_state(6), golden.experts("minimal", "fp32"))
