"""From what was asked for and what is there to what is started: pure, so any machine can be planned on any other.

`make_plan` replaces every `auto`; `Plan.coordinator_spec` and `Plan.worker_spec` then say what one incarnation of one
process is started with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evrun.coordinator.spec import CoordinatorSpec
from evrun.expert_worker.spec import WorkerSpec
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.errors import DeviceError, UsageError
from evrun.expert_worker.wire.slots import SlotLayout
from evrun.launch.config import RUNGS, RequestConfig, RunConfig
from evrun.launch.cores import coordinator_cores, describe_shares, divide_cores
from evrun.launch.devices import Card, Machine
from evrun.launch.faults import Fault

DEFAULT_WORLD = 4
DEFAULT_MAX_CONTEXT = 32768
CPU_RUNG = "in-place"

Identity = Mapping[str, tuple[int, int, int, int]]


@dataclass(frozen=True)
class Seat:
    """Where one process runs."""

    device: str
    """`cpu` or `cuda:GPU-<uuid>`."""
    cause: str
    """Why this device and no card; empty for a card."""
    cpus: tuple[int, ...]
    threads: int


@dataclass(frozen=True)
class Wiring:
    """Addresses and descriptors of one run, as every spec holds them."""

    run_id: str
    secret: str
    hub_address: str
    requests_path: str
    call_fd: int
    call_read_fd: int
    reply_fds: list[int]
    request_bell_fds: list[int]
    reply_bell_fds: list[int]
    lifeline_fd: int
    launcher_pid: int
    cache_dir: str


@dataclass(frozen=True)
class Plan:
    """One run with nothing left open."""

    config: RunConfig
    world: int
    ranks: tuple[Seat, ...]
    coordinator: Seat
    max_context: int
    prefill_chunk: int
    layout: SlotLayout
    identity: Identity
    cpu_kernel: str
    """Backend of CPU workers; `auto` until `with_cpu_kernel`."""
    card_kernels: Mapping[str, str]
    """The same of workers on cards, by device; empty until `with_card_kernels`."""
    pin_budget: int
    """Bytes of shards that one worker may have registered with the driver."""
    card_memory: Mapping[str, int]
    """Memory of the cards in use, bytes, by device."""
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]
    """For people: devices and cores, one line each."""

    @property
    def uses_cpu(self) -> bool:
        return any(seat.device == "cpu" for seat in self.ranks)

    def with_cpu_kernel(self, name: str, passed_over: str) -> Plan:
        """This plan with the kernel that `launch.cpu_kernel` chose."""
        return dataclasses.replace(self, cpu_kernel=name, notes=(*self.notes, *filter(None, [passed_over])))

    def with_card_kernels(self, tried: Mapping[str, tuple[str, Sequence[str]]]) -> Plan:
        """This plan with what `launch.card_trial` found. `tried`: {device: (kernel, why preferred ones are not used)}."""
        notes = [
            f"rank {rank}: card kernel {tried[seat.device][0]}, which is slower, is used; {'; '.join(tried[seat.device][1])}"
            for rank, seat in enumerate(self.ranks)
            if seat.device in tried and tried[seat.device][1]
        ]
        kernels = {device: kernel for device, (kernel, _) in tried.items() if kernel}
        return dataclasses.replace(self, card_kernels=kernels, notes=(*self.notes, *notes))

    def coordinator_spec(self, wiring: Wiring, incarnation: int, supervision_fd: int) -> CoordinatorSpec:
        config = self.config
        return CoordinatorSpec(
            run_id=wiring.run_id,
            name=config.name,
            secret=wiring.secret,
            incarnation=incarnation,
            world_size=self.world,
            checkpoint=config.checkpoint,
            device=self.coordinator.device,
            cpus=list(self.coordinator.cpus),
            threads=self.coordinator.threads,
            numerics=config.numerics,
            dtype=config.dtype,
            dense_dtype=config.dense_dtype,
            deal=config.deal,
            combine=config.combine,
            prefill_chunk=self.prefill_chunk,
            max_context=self.max_context,
            on_loss=config.on_loss,
            transport=config.transport,
            stall_timeout_s=config.stall_timeout,
            kill_timeout_s=config.kill_timeout,
            first_call_timeout_s=config.first_call_timeout,
            start_timeout_s=config.start_timeout,
            hub_address=wiring.hub_address,
            requests_path=wiring.requests_path,
            supervision_fd=supervision_fd,
            call_fd=wiring.call_fd,
            reply_fds=wiring.reply_fds,
            request_bell_fds=wiring.request_bell_fds,
            reply_bell_fds=wiring.reply_bell_fds,
            lifeline_fd=wiring.lifeline_fd,
            launcher_pid=wiring.launcher_pid,
            cache_dir=wiring.cache_dir,
            check_payload=config.check_payload,
            log_level=config.log_level,
            faults=faults_for(self.faults, "coordinator", incarnation),
        )

    def worker_spec(self, wiring: Wiring, rank: int, incarnation: int) -> WorkerSpec:
        config, seat = self.config, self.ranks[rank]
        return WorkerSpec(
            run_id=wiring.run_id,
            name=config.name,
            secret=wiring.secret,
            rank=rank,
            world_size=self.world,
            incarnation=incarnation,
            checkpoint=config.checkpoint,
            shard_identity=dict(self.identity),
            device=seat.device,
            cpus=list(seat.cpus),
            threads=seat.threads,
            backend=self.cpu_kernel,
            card_kernel=self.card_kernels.get(seat.device, "cuda"),
            numerics=config.numerics,
            dtype=config.dtype,
            combine=config.combine,
            prefill_chunk=self.prefill_chunk,
            transport=config.transport,
            hub_address=wiring.hub_address,
            call_fd=wiring.call_read_fd,
            reply_fd=wiring.reply_fds[rank],
            request_bell_fd=wiring.request_bell_fds[rank],
            reply_bell_fd=wiring.reply_bell_fds[rank],
            lifeline_fd=wiring.lifeline_fd,
            launcher_pid=wiring.launcher_pid,
            log_level=config.log_level,
            faults=faults_for(self.faults, rank, incarnation),
            cache_dir=wiring.cache_dir,
            card_cache_bytes=self._card_cache(seat.device),
            pin_budget_bytes=self.pin_budget,
            rungs=["registered"] if config.require == "registered" else ["registered", "arena"],
        )

    def _card_cache(self, device: str) -> int:
        """Bytes of a worker's card cache; -1: what is free. Workers that share a card share three quarters of it, or half
        when the dense tree is there too."""
        sharing, dense = sum(seat.device == device for seat in self.ranks), self.coordinator.device == device
        if self.config.card_cache is not None or (sharing == 1 and not dense):
            return -1 if self.config.card_cache is None else self.config.card_cache
        return self.card_memory.get(device, 0) * (2 if dense else 3) // 4 // sharing


def make_plan(
    config: RunConfig,
    machine: Machine,
    model: ModelConfig,
    identity: Identity,
    faults: Sequence[Fault] = (),
    unfit: Mapping[str, str] | None = None,
) -> Plan:
    """Raises UsageError (context), DeviceError (a card or a rung that was asked for is not there).

    unfit  {uuid of a card: why it cannot be used}, from `launch.card_trial`; empty text when it can
    """
    world = len(config.workers) or config.world or len(machine.cards) or DEFAULT_WORLD
    max_context = context_limit(config.max_context, model)
    placed = [device_for_rank(rank, config, machine.cards, machine.no_card, unfit or {}) for rank in range(world)]
    on_cards = sum(device != "cpu" for device, _ in placed)
    own = coordinator_cores(len(machine.cores), on_cards == world)
    nodes = {f"cuda:{card.uuid}": card.node for card in machine.cards}
    wanted = [nodes.get(device) for device, _ in placed]
    shares, shared_note = divide_cores(machine.cores, world, own, machine.core_nodes, wanted)
    ranks = tuple(_seat(device, cause, share) for (device, cause), share in zip(placed, shares[1:], strict=True))
    for rank, seat in enumerate(ranks):
        if config.require is not None and seat.device == "cpu" and falls_short(CPU_RUNG, config.require):
            asked = f"--require {config.require}: rank {rank} runs on the CPU, whose rows are {CPU_RUNG}"
            raise DeviceError(f"{asked} ({seat.cause or 'asked for'}); use a card or drop --require")
    chunk = min(config.prefill_chunk, max_context)
    layout = SlotLayout.of(model, world, chunk, config.dtype, config.combine)
    notes = [f"rank {rank} on the CPU: {seat.cause}" for rank, seat in enumerate(ranks) if seat.cause]
    notes.append(describe_deadlines(config))
    notes.append(f"cores: {machine.cores_note}; {describe_shares(shares)}{shared_note}")
    memory = {f"cuda:{card.uuid}": card.memory_bytes for card in machine.cards}
    pin_budget = config.pin_budget if config.pin_budget is not None else machine.memory_bytes // 2 // max(1, on_cards)
    if on_cards:
        notes.append(f"pin budget: {pin_budget / 2**30:.1f} GiB of shards per card worker; {machine.memory_note}")
    coordinator = _seat(coordinator_device(config, machine), "", shares[0])
    return Plan(
        config, world, ranks, coordinator, max_context, chunk, layout, identity, config.cpu_kernel, {}, pin_budget, memory, tuple(faults),
        tuple(notes),
    )  # fmt: skip


def cards_wanted(config: RunConfig, machine: Machine) -> list[Card]:
    """The cards that some rank would get, each once."""
    world = len(config.workers) or config.world or len(machine.cards) or DEFAULT_WORLD
    indices = {_card_index(rank, config) for rank in range(world)} - {None}
    return [card for i, card in enumerate(machine.cards) if i in indices]


def _card_index(rank: int, config: RunConfig) -> int | None:
    """Which visible card a rank is to have; None: the CPU."""
    wanted = config.workers[rank] if config.workers else config.device
    return None if wanted == "cpu" else int(wanted[5:]) if wanted.startswith("cuda:") else rank


def device_for_rank(rank: int, config: RunConfig, cards: Sequence[Card], no_card: str, unfit: Mapping[str, str]) -> tuple[str, str]:
    """(device, why not a card) of one rank. Raises DeviceError where a card was asked for by name and cannot be had.

    `auto` gives rank r the card r; `--workers cuda:K` names the K-th card that is visible.
    """
    wanted = config.workers[rank] if config.workers else config.device
    index = _card_index(rank, config)
    if index is None:
        return "cpu", ""
    cause = unfit.get(cards[index].uuid, "") if index < len(cards) else no_card
    if not cause:
        return f"cuda:{cards[index].uuid}", ""
    if wanted == "auto":
        return "cpu", cause
    source = f"--workers {wanted}" if config.workers else "--device cuda"
    raise DeviceError(f"{source}: rank {rank} cannot have a card: {cause}; use --device auto or --device cpu")


def coordinator_device(config: RunConfig, machine: Machine) -> str:
    """Raises DeviceError when there is no such card."""
    if config.coordinator == "cpu":
        return "cpu"
    index = int(config.coordinator[5:])
    if index >= len(machine.cards):
        raise DeviceError(f"--coordinator {config.coordinator}: {machine.no_card}; use --coordinator cpu")
    return f"cuda:{machine.cards[index].uuid}"


def context_limit(asked: int | None, model: ModelConfig) -> int:
    """Most positions of a request. Raises UsageError with both numbers when the model has fewer."""
    most = model.max_position_embeddings
    if asked is None:
        return min(most, DEFAULT_MAX_CONTEXT)
    if asked > most:
        raise UsageError(f"--max-context: expected at most {most}, the model's maximum, found {asked}")
    return asked


def check_request(request: RequestConfig, model: ModelConfig, max_context: int) -> None:
    """What can be said of a request before anything is started. Raises UsageError."""
    most = model.max_position_embeddings
    for position, token in enumerate(request.prompt_ids):
        if token >= model.vocab_size:
            raise UsageError(f"--prompt-ids: expected ids below {model.vocab_size}, the vocabulary, found {token} at position {position}")
    positions = len(request.prompt_ids) + request.max_new_tokens
    if positions > max_context:
        found = (
            f"prompt {len(request.prompt_ids)} tokens + {request.max_new_tokens} new = {positions}"
            if request.prompt_ids
            else str(positions)
        )
        where = "context" if request.prompt_ids else "--max-new-tokens"
        raise UsageError(f"{where}: expected at most {max_context} positions (--max-context; the model's maximum is {most}), found {found}")
    if request.top_logits > model.vocab_size:
        raise UsageError(f"--top-logits: expected at most {model.vocab_size}, the vocabulary, found {request.top_logits}")


def falls_short(rung: str, required: str) -> bool:
    """Whether rows come from a lower rung than required."""
    return rung not in RUNGS or RUNGS.index(rung) > RUNGS.index(required)


def describe_deadlines(config: RunConfig) -> str:
    start, first = f"start {config.start_timeout:g} s", f"first call {config.first_call_timeout:g} s"
    return f"deadlines without progress: {start}, {first}, stall {config.stall_timeout:g} s, kill {config.kill_timeout:g} s"


def faults_for(faults: Sequence[Fault], whom: int | str, incarnation: int) -> list[Fault]:
    """The scripted faults of one process: its `rank` (a number or `coordinator`), and its `incarnation` unless that is 0 (any)."""
    return [f for f in faults if f["rank"] == whom and f.get("incarnation", 0) in (0, incarnation)]


def _seat(device: str, cause: str, share: Sequence[tuple[int, ...]]) -> Seat:
    """One CPU of each core comes first: thread i of a kernel is pinned to the i-th."""
    threads = range(max(map(len, share)))
    return Seat(device, cause, tuple(core[i] for i in threads for core in share if i < len(core)), len(share))
