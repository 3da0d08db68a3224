"""Trains the demo model: AdamW with fake-quantised weights, a schedule over wall-clock time, router biases that balance the load.

    python -m evrun.demo.train DATA OUT --seconds 480

DATA is what `evrun.demo.data.corpus` wrote. OUT gets the checkpoint, the parameters (bfloat16, in pieces) and train.log.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from evrun.coordinator.engram_map import token_map
from evrun.demo import evaluate, geometry, sampling
from evrun.demo.arithmetic import Arithmetic
from evrun.demo.data.corpus import QUESTIONS
from evrun.demo.data.facts import Question, load_questions
from evrun.demo.export import export
from evrun.demo.model import TrainingModel
from evrun.demo.parameters import Parameters, start
from evrun.demo.unpack import unpack

BALANCE_WEIGHT = 0.003
INDEX_WEIGHT = 0.1
BIAS_STEP = 0.001
WARM_UP = 0.02
"""Of the time."""
LOWEST_RATE = 0.02
"""Of the peak, at the end."""
LEAP = 0.4
"""Of the log-loss, above the best so far: not noise."""
PIECE_BYTES = 15 << 20
PROMPTS = ("Once upon a time", "The capital of France is", "A dog is", "The economy of")


@dataclass(frozen=True)
class Options:
    seconds: float
    batch: int
    length: int
    rate: float
    seed: int
    pool: int
    """Tokens drawn at a time."""
    unrounded: float
    """Share of the steps whose activations are not rounded, as with `--numerics weights-only`."""
    facts: float
    """Share of the tokens that are facts; other kinds keep their proportions."""
    dtype: str
    """What values are rounded to between operations: bfloat16, or float32 where the processor has no bfloat16."""


class Trainer:
    """Parameters, optimiser and the step."""

    def __init__(self, model: TrainingModel, parameters: Parameters, options: Options, device: torch.device) -> None:
        self.model = model
        self.parameters = {name: tensor.to(device).requires_grad_(not _is_bias(name)) for name, tensor in parameters.items()}
        self._options = options
        trained = [(name, p) for name, p in self.parameters.items() if p.requires_grad]
        groups = [
            {"params": [p for name, p in trained if _decays(name, p)], "weight_decay": 0.05},
            {"params": [p for name, p in trained if not _decays(name, p)], "weight_decay": 0.0},
        ]
        self._optimiser = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95), eps=1e-10, fused=device.type == "cuda")
        self.loads = torch.zeros(model.config.num_hidden_layers, model.config.n_routed_experts, device=device)
        """Tokens of each expert, an average over the last steps"""
        self._caution = 1.0
        self._kept: tuple[float, list[torch.Tensor], dict[str, Any]] | None = None

    @property
    def _trained(self) -> list[torch.Tensor]:
        return [p for p in self.parameters.values() if p.requires_grad]

    def rehearse(self, tokens: torch.Tensor, arithmetic: Arithmetic) -> None:
        """A step that changes nothing: what compiles does so now."""
        out = self.model(self.parameters, tokens[:, :-1], arithmetic)
        (out.logits.mean() + out.balance + out.index_loss).backward()
        self._optimiser.zero_grad(set_to_none=True)

    def step(self, tokens: torch.Tensor, done: float, arithmetic: Arithmetic) -> torch.Tensor:
        """tokens [B, S + 1]; done: share of the time that is over. Returns the log-loss, on the device."""
        for group in self._optimiser.param_groups:
            group["lr"] = self._options.rate * self._caution * rate(done)
        out = self.model(self.parameters, tokens[:, :-1], arithmetic)
        loss = cross_entropy(out.logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss + BALANCE_WEIGHT * out.balance + INDEX_WEIGHT * out.index_loss).backward()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            self.loads.lerp_(out.loads / out.loads.sum(1, keepdim=True), 0.05)
            for layer, load in enumerate(out.loads):
                self.parameters[f"layers.{layer}.ffn.gate.bias"] += BIAS_STEP * (load.mean() - load).sign()
        return loss.detach()


    def keep_or_return(self, log_loss: float) -> bool:
        """Remember this state while the loss falls; where it has leapt, go back to the one remembered, at half the rate.

        Returns whether it went back.
        """
        if self._kept is None or log_loss < self._kept[0] + 0.1:
            best = min(log_loss, self._kept[0]) if self._kept else log_loss
            values = [p.detach().clone() for p in self.parameters.values()]
            self._kept = best, values, copy.deepcopy(self._optimiser.state_dict())
            return False
        if log_loss < self._kept[0] + LEAP:
            return False
        with torch.no_grad():
            for p, value in zip(self.parameters.values(), self._kept[1], strict=True):
                p.copy_(value)
        self._optimiser.load_state_dict(copy.deepcopy(self._kept[2]))
        self._caution /= 2
        return True


def rate(done: float) -> float:
    """Share of the peak learning rate: a linear start, then half a cosine."""
    if done < WARM_UP:
        return max(done, 1e-3) / WARM_UP
    return LOWEST_RATE + (1 - LOWEST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, (done - WARM_UP) / (1 - WARM_UP))))


def train(trainer: Trainer, texts: sampling.Encoded, options: Options, say: Callable[[str], None]) -> None:
    """Steps until the time is over, which does not count what is compiled before the first."""
    device = trainer.loads.device
    rng = np.random.default_rng(options.seed)
    shares, dtype = sampling.shares(options.facts), getattr(torch, options.dtype)
    rows = torch.from_numpy(sampling.pool(texts, options.pool, options.length, rng, shares)).to(device)
    trainer.rehearse(rows[: options.batch].long(), Arithmetic(dtype))
    say("ready")
    began = time.monotonic()
    at, steps, said, seen = 0, 0, 0.0, 0
    losses: list[torch.Tensor] = []
    while (spent := time.monotonic() - began) < options.seconds:
        if at + options.batch > len(rows):
            rows, at = torch.from_numpy(sampling.pool(texts, options.pool, options.length, rng, shares)).to(device), 0
        tokens = rows[at : at + options.batch].long()
        at += options.batch
        arithmetic = Arithmetic(dtype, rounds_inputs=bool(rng.random() >= options.unrounded))
        losses.append(trainer.step(tokens, spent / options.seconds, arithmetic))
        steps += 1
        seen += options.batch * options.length
        if spent - said > options.seconds / 40 or steps in (1, 5, 20):
            mean = float(torch.stack(losses).mean())
            spent = time.monotonic() - began
            say(f"{spent:6.1f} s  step {steps}  {seen / 1e6:.2f} M tokens  {seen / spent:.0f} tokens/s  log-loss {mean:.4f}")
            if not math.isfinite(mean):
                raise ArithmeticError(f"step {steps}: log-loss {mean}")
            if trainer.keep_or_return(mean):
                say("the loss has leapt: back to the state before, at half the rate")
            losses.clear()
            said = spent


def report(trainer: Trainer, held: sampling.Encoded, questions: list[Question], tokenizer: Tokenizer, options: Options) -> dict[str, Any]:
    """Right answers by kind, log-loss with and without packed experts, use of the experts, a few continuations."""
    model, p = trainer.model, {name: tensor.detach() for name, tensor in trainer.parameters.items()}
    found: dict[str, Any] = {}
    usual = Arithmetic(getattr(torch, options.dtype))
    variants = {"reference": usual, "weights-only": dataclasses.replace(usual, rounds_inputs=False)}
    for name, arithmetic in variants.items():
        right = evaluate.right_answers(model, p, questions, tokenizer, arithmetic)
        counts: dict[str, list[int]] = {}
        for question, ok in zip(questions, right, strict=True):
            count = counts.setdefault(question.kind, [0, 0])
            count[0] += ok
            count[1] += 1
        found[f"right ({name})"] = counts
        found[f"wrong ({name})"] = [q.prompt for q, ok in zip(questions, right, strict=True) if not ok][:20]
    rows = evaluate.held_out_rows(held, options.length)
    found["held-out log-loss, packed"] = evaluate.log_loss(model, p, rows, usual)
    unpacked = dataclasses.replace(usual, packs_experts=False)
    found["held-out log-loss, experts unpacked"] = evaluate.log_loss(model, p, rows, unpacked)
    found["held-out log-loss, nothing packed"] = evaluate.log_loss(model, p, rows, dataclasses.replace(unpacked, packs_dense=False))
    share = trainer.loads * model.config.n_routed_experts
    found["load of the least and most used expert, 1 is even"] = [round(float(share.min()), 3), round(float(share.max()), 3)]
    prompts = [[model.config.bos_token_id, *tokenizer.encode(text).ids] for text in PROMPTS]
    continued = evaluate.complete(model, p, prompts, 60, usual)
    found["continuations"] = [a + tokenizer.decode(ids) for a, ids in zip(PROMPTS, continued, strict=True)]
    return found


def save(parameters: Parameters, folder: Path) -> None:
    """parameters-N.safetensors, bfloat16, none larger than PIECE_BYTES (unless one tensor is)."""
    pieces: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in parameters.items():
        value = tensor.detach().to("cpu", torch.bfloat16).contiguous()
        if pieces[-1] and size + value.nbytes > PIECE_BYTES:
            pieces.append({})
            size = 0
        pieces[-1][name] = value
        size += value.nbytes
    for number, piece in enumerate(pieces):
        save_file(piece, folder / f"parameters-{number}.safetensors")


def restore(folder: Path) -> Parameters:
    """What `save` wrote, or the values of a checkpoint, fp32."""
    if (folder / "config.json").is_file():
        return unpack(folder)
    found: Parameters = {}
    for path in sorted(folder.glob("parameters-*.safetensors")):
        found |= {name: tensor.float() for name, tensor in load_file(path).items()}
    return found


def _is_bias(name: str) -> bool:
    return name.endswith(".gate.bias")


def _decays(name: str, p: torch.Tensor) -> bool:
    return p.dim() >= 2 and "embed" not in name and "engram." not in name and "hc_" not in name


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pool", type=int, default=16_000_000)
    parser.add_argument("--unrounded", type=float, default=0.0, help="share of the steps that do not round activations")
    parser.add_argument("--facts", type=float, default=sampling.SHARES["facts"], help="share of the tokens that are facts")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--resume", type=Path, help="folder with the parameters of an earlier run, or a checkpoint")
    return parser.parse_args()


def main() -> None:
    asked = _options()
    options = Options(**{f.name: getattr(asked, f.name) for f in dataclasses.fields(Options)})
    asked.out.mkdir(parents=True, exist_ok=True)
    log = (asked.out / "train.log").open("a", encoding="utf-8")

    def say(text: str) -> None:
        print(text, flush=True)  # noqa: T201
        log.write(text + "\n")
        log.flush()

    torch.manual_seed(options.seed)
    # bfloat16 and fp8 values are exact in TF32, so only what is fp32 throughout is rounded (gates, mixing weights).
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.recompile_limit = 64
    config = geometry.config(asked.data / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(asked.data / "tokenizer.json"))
    compiler: Callable[[Any], Any] = (lambda f: torch.compile(f, dynamic=False)) if asked.compile else lambda f: f
    ids = token_map(asked.data / "tokenizer.json", config.vocab_size)
    parameters = restore(asked.resume) if asked.resume else start(config, options.seed)
    trainer = Trainer(TrainingModel(config, ids, compiler), parameters, options, torch.device(asked.device))
    say(f"{sum(p.numel() for p in trainer.parameters.values()) / 1e6:.1f} M parameters on {asked.device}, {options}")
    train(trainer, sampling.load(asked.data / "train.npz"), options, say)
    save(trainer.parameters, asked.out)
    say(f"{export(trainer.parameters, config, tokenizer, asked.out / 'checkpoint', force=True)} bytes of tensors")
    trainer.model = TrainingModel(config, ids)
    found = report(trainer, sampling.load(asked.data / "held-out.npz"), load_questions(QUESTIONS), tokenizer, options)
    for name, value in found.items():
        say(f"{name}: {json.dumps(value, ensure_ascii=False, indent=1) if isinstance(value, list) else value}")


if __name__ == "__main__":
    main()
