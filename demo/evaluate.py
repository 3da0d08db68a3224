"""What a model in training is asked: the questions of the demo, greedily, and the log-loss of texts it has not seen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from evrun.demo import sampling
from evrun.demo.arithmetic import Arithmetic
from evrun.demo.data.facts import Question
from evrun.demo.model import TrainingModel
from evrun.demo.parameters import Parameters


@torch.no_grad()
def complete(
    model: TrainingModel, p: Parameters, prompts: Sequence[Sequence[int]], new_tokens: int, arithmetic: Arithmetic
) -> list[list[int]]:
    """Greedy continuations up to and without EOS, or new_tokens long; the prompts are computed anew for each token."""
    device = p["embed.weight"].device
    lengths = [len(prompt) for prompt in prompts]
    tokens = torch.zeros(len(prompts), max(lengths) + new_tokens, dtype=torch.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    tokens = tokens.to(device)
    rows, at = torch.arange(len(prompts), device=device), torch.tensor(lengths, device=device)
    for _ in range(new_tokens):
        # What lies behind a row's newest token is never seen by it.
        logits = model(p, tokens[:, : int(at.max())], arithmetic).logits[rows, at - 1]
        tokens[rows, at] = logits.argmax(-1)
        at = at + 1
    eos = model.config.eos_token_id
    found = [row[start : start + new_tokens].tolist() for row, start in zip(tokens.cpu(), lengths, strict=True)]
    return [row[: row.index(eos)] if eos in row else row for row in found]


def right_answers(
    model: TrainingModel, p: Parameters, questions: Sequence[Question], tokenizer: Tokenizer, arithmetic: Arithmetic
) -> list[bool]:
    """Whether each question is continued by exactly its answer and EOS."""
    bos = model.config.bos_token_id
    prompts = [[bos, *tokenizer.encode(q.prompt).ids] for q in questions]
    longest = max(len(tokenizer.encode(q.answer).ids) for q in questions) + 1
    found = complete(model, p, prompts, longest, arithmetic)
    return [len(ids) < longest and tokenizer.decode(ids) == q.answer for ids, q in zip(found, questions, strict=True)]


@torch.no_grad()
def log_loss(model: TrainingModel, p: Parameters, rows: npt.NDArray[np.int32], arithmetic: Arithmetic, batch: int = 32) -> float:
    """Mean negative log-probability, nats a token, of rows [n, length + 1]."""
    device = p["embed.weight"].device
    total = 0.0
    for start in range(0, len(rows), batch):
        tokens = torch.from_numpy(rows[start : start + batch].astype(np.int64)).to(device)
        logits = model(p, tokens[:, :-1], arithmetic).logits
        total += float(cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"))
    return total / (len(rows) * int(rows.shape[1] - 1))


def held_out_rows(texts: sampling.Encoded, length: int, tokens: int = 60_000) -> npt.NDArray[np.int32]:
    """The same rows at every call."""
    shares = {kind: share for kind, share in sampling.SHARES.items() if kind in texts}
    total = sum(shares.values())
    return sampling.pool(texts, tokens, length, np.random.default_rng(0), {kind: share / total for kind, share in shares.items()})
