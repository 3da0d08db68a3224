"""An examination: machine, checkpoint, plan, rates, prediction, put together. The I/O is in `facts`, `residency` and `rates`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.dtypes import ITEM_BYTES
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.checkpoint.schema import is_engram_table, other_specs
from evrun.launch import cpu_kernel, devices
from evrun.launch.card_trial import try_cards
from evrun.launch.config import RunConfig
from evrun.launch.doctor import facts, predict, rates
from evrun.launch.doctor.needs import needs
from evrun.launch.doctor.residency import expert_share
from evrun.launch.export.geometry import make_config, values
from evrun.launch.plan import Plan, cards_wanted, make_plan

COLD_BYTES = 96 << 20
RELEASE_COMPRESSED_VOCABULARY = 99092


@dataclass
class Examination:
    """What is printed."""

    machine: dict[str, Any]
    checkpoint: dict[str, Any]
    plan: dict[str, Any]
    fit: predict.Fit
    inputs: predict.Inputs | None
    """None when the plan does not fit: nothing is measured then."""
    prediction: predict.Prediction | None
    helps: list[dict[str, str | float]]
    cold_start: dict[str, float] | None = None
    """Bytes of the experts that are not in memory yet and will be, and the seconds that their first use takes in all."""

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "checkpoint": self.checkpoint,
            "plan": self.plan,
            "fit": vars(self.fit),
            "prediction": vars(self.prediction) | {"inputs": self.inputs.to_json()} if self.prediction and self.inputs else None,
            "cold_start": self.cold_start,
            "helps": self.helps,
        }


def examine(config: RunConfig, prompt_tokens: int, say: Callable[[str], None]) -> Examination:
    """`config.checkpoint` may be empty: the release's geometry then. Raises EvrunError: a checkpoint that is refused, a card that
    was asked for and is not there."""
    machine = devices.look(os.environ)
    checkpoint = Checkpoint.open(config.checkpoint) if config.checkpoint else None
    model = checkpoint.config if checkpoint else release_config()
    say("trying cards and kernels")
    verdicts = try_cards(cards_wanted(config, machine), config, model, cache_dir())
    unfit = {uuid: verdict.unfit for uuid, verdict in verdicts.items()}
    plan = make_plan(config, machine, model, checkpoint.identity() if checkpoint else {}, (), unfit)
    if plan.uses_cpu:
        plan = plan.with_cpu_kernel(*cpu_kernel.choose(config.cpu_kernel))
    share = expert_share(checkpoint) if checkpoint else None
    experts_bytes = model.row_bytes * model.num_hidden_layers * model.n_routed_experts
    fit = predict.fit(needs(plan, model), experts_bytes, devices.available_memory_bytes())
    found = Examination(
        facts.gather(machine, os.environ) | {"unfit_cards": {uuid: why for uuid, why in unfit.items() if why}},
        _checkpoint_facts(config.checkpoint, checkpoint, model, experts_bytes, share),
        _plan_facts(plan),
        fit,
        None,
        None,
        [],
    )
    if fit.verdict == "no":
        return found
    say("measuring rates, some seconds")
    wanted = _wanted(config, plan, prompt_tokens, COLD_BYTES if fit.resident < 1 or (share is not None and share < 0.99) else 0)
    measured = rates.measure(wanted)
    resident = fit.resident if measured.cold_bytes_per_s else 1.0
    found.inputs = make_inputs(model, plan, measured, resident, prompt_tokens)
    found.prediction = predict.predict(found.inputs)
    found.helps = predict.what_helps(found.inputs)
    if share is not None and measured.cold_bytes_per_s:
        missing = max(0.0, fit.resident - share) * experts_bytes
        found.cold_start = {"bytes": missing, "seconds": missing / measured.cold_bytes_per_s}
    return found


def release_config() -> ModelConfig:
    """The released model's geometry."""
    return make_config(values("release"), RELEASE_COMPRESSED_VOCABULARY)


def make_inputs(model: ModelConfig, plan: Plan, measured: rates.Rates, resident: float, prompt_tokens: int) -> predict.Inputs:
    """The prediction's inputs of a plan. Cards that could not be measured take no part: their ranks would not start either."""
    attention, shared, head = token_bytes(model)
    experts_bytes = model.row_bytes * model.num_hidden_layers * model.n_routed_experts
    ranks = tuple(predict.Place(seat.device, seat.cpus[: seat.threads]) for seat in plan.ranks)
    return predict.Inputs(
        layers=model.num_hidden_layers,
        experts=model.n_routed_experts,
        top_k=model.num_experts_per_tok,
        hidden=model.hidden_size,
        row_bytes=model.row_bytes,
        attention_bytes=attention,
        shared_bytes=shared,
        head_bytes=head,
        coordinator_cores=plan.coordinator.cpus[: plan.coordinator.threads],
        ranks=tuple(r for r in ranks if r.device == "cpu" or r.device.partition(":")[2] in measured.cards),
        resident=resident,
        registered=min(1.0, plan.pin_budget / experts_bytes),
        prompt_tokens=prompt_tokens,
        prefill_chunk=plan.prefill_chunk,
        rates=measured,
    )


def token_bytes(model: ModelConfig) -> tuple[int, int, int]:
    """(attention and the rest, shared experts, head): bytes of dense weights that one token reads. Of the embedding and the Engram
    tables only rows are looked up."""
    attention = shared = head = 0
    for name, (dtype, shape) in other_specs(model).items():
        size = ITEM_BYTES[dtype] * math.prod(shape)
        if name == "head.weight":
            head += size
        elif ".shared_experts." in name:
            shared += size
        elif name != "embed.weight" and not is_engram_table(name):
            attention += size
    return attention, shared, head


def _wanted(config: RunConfig, plan: Plan, prompt_tokens: int, cold_bytes: int) -> rates.Wanted:
    cpu_ranks = [seat for seat in plan.ranks if seat.device == "cpu"]
    cards = {seat.device.partition(":")[2]: seat for seat in plan.ranks if seat.device != "cpu"}
    return rates.Wanted(
        checkpoint=os.path.abspath(config.checkpoint) if config.checkpoint else "",
        coordinator_cpus=list(plan.coordinator.cpus),
        coordinator_threads=plan.coordinator.threads,
        worker_cpus=list(dict.fromkeys(cpu for seat in cpu_ranks for cpu in seat.cpus[: seat.threads])),
        world=plan.world,
        cpu_kernel=plan.cpu_kernel,
        numerics=config.numerics,
        dtype=config.dtype,
        dense_dtype=config.dense_dtype,
        context=prompt_tokens,
        cards=list(cards),
        arena_threads=max((seat.threads for seat in cards.values()), default=1),
        cache_dir=cache_dir(),
        cold_bytes=cold_bytes,
    )


def _checkpoint_facts(
    path: str, checkpoint: Checkpoint | None, model: ModelConfig, experts_bytes: int, share: float | None
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "directory": path or None,
        "layers": model.num_hidden_layers,
        "experts": model.n_routed_experts,
        "row_bytes": model.row_bytes,
        "expert_bytes": experts_bytes,
        "resident_expert_percent": None if share is None else round(100 * share, 2),
    }
    if checkpoint is None:
        return found
    found |= {"dense_bytes": checkpoint.dense_bytes, "engram_bytes": checkpoint.engram_bytes, "warnings": checkpoint.warnings}
    return found


def _plan_facts(plan: Plan) -> dict[str, Any]:
    return {
        "world": plan.world,
        "coordinator": {"device": plan.coordinator.device, "cores": list(plan.coordinator.cpus), "threads": plan.coordinator.threads},
        "ranks": [
            {"rank": rank, "device": seat.device, "why_no_card": seat.cause, "cores": list(seat.cpus), "threads": seat.threads}
            for rank, seat in enumerate(plan.ranks)
        ],
        "cpu_kernel": plan.cpu_kernel if plan.uses_cpu else None,
        "rung": ["in-place" if seat.device == "cpu" else "registered, arena" for seat in plan.ranks],
        "pin_budget_bytes": plan.pin_budget,
        "prefill_chunk": plan.prefill_chunk,
        "max_context": plan.max_context,
        "notes": list(plan.notes),
    }


def cache_dir() -> str:
    """Where compiled kernels are kept."""
    return str(Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "evrun")

