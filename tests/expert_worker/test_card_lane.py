"""The card lane on an emulated card: the kernels' own source, rows from a real checkpoint, every rung, every fault."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_memory import HostStream
from one_token_call import serve
from test_cuda_emulated import CALLED, HOPPER, HostCard

from evrun.bench import card_rate
from evrun.expert_worker.card import rungs
from evrun.expert_worker.card.lane import CardLane
from evrun.expert_worker.card.slot_table import CAPACITY
from evrun.expert_worker.lane import CpuLane
from evrun.expert_worker.rows import Rows
from evrun.expert_worker.spec import WorkerSpec
from evrun.expert_worker.timeline import Timeline
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.errors import DeviceError, PayloadError, RunError
from evrun.expert_worker.wire.slots import ReplyMemory, SlotLayout
from evrun.kernels import cuda
from evrun.kernels.api import FfnShape
from evrun.kernels.cuda.driver import REGISTER_PORTABLE, REGISTER_READ_ONLY
from evrun.kernels.cuda.errors import DeviceError as CardError
from evrun.kernels.cuda.errors import UnavailableError
from evrun.kernels.native.library import NativeLibraryError
from evrun.launch.doctor.rates import Wanted

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]  # compiles the kernels
FULL = Path(__file__).parents[1] / "golden" / "full" / "checkpoint"
TOKENS = 9


class HostEvent:
    handle = None

    def record(self, stream: HostStream) -> None: ...

    def synchronize(self) -> None: ...


class Stream(HostStream):
    def wait(self, event: HostEvent) -> None: ...

    def close(self) -> None: ...


class Registration:
    def __init__(self, card: EmulatedCard, address: int, size: int) -> None:
        self.address, self._card, self._size = address, card, size
        card.registered += size

    def close(self) -> None:
        self._card.registered -= self._size


class EmulatedCard(HostCard):
    """HostCard with what the lane asks of a driver.Device. `refuses`: registration flags this driver does not take."""

    name = "emulated"

    def __init__(self, folder: Path, refuses: tuple[int, ...] = (), free_bytes: int = 1 << 31) -> None:
        super().__init__(HOPPER, folder)
        self._refuses, self._free = refuses, free_bytes
        self.registered = 0
        self.copied: list[tuple[int, int]] = []

    def stream(self) -> Stream:
        return Stream()

    def event(self, timing: bool = False) -> HostEvent:
        return HostEvent()

    def memory_bytes(self) -> tuple[int, int]:
        return self._free, self._free

    def register(self, address: int, size: int, flags: int) -> Registration:
        if flags in self._refuses:
            raise CardError("cuMemHostRegister_v2", 801, "CUDA_ERROR_NOT_SUPPORTED")
        return Registration(self, address, size)

    def host_device_address(self, address: int) -> int:
        return address

    def close(self) -> None: ...

    def fail(self, function: str, code: int) -> CardError:
        return CardError(function, code, "CUDA_ERROR_LAUNCH_FAILED")

    def copy_in(self, to: int, host: int, size: int, stream: HostStream) -> None:
        self.copied.append((host, size))
        ctypes.memmove(to, host, size)


class Bench:
    """A lane and what it is compared with."""

    def __init__(self, folder: Path, card: EmulatedCard, checkpoint: Path = FULL, **options: Any) -> None:
        self.checkpoint = Checkpoint.open(checkpoint)
        combine = options.get("combine", "partial")
        self.layout = SlotLayout.of(self.checkpoint.config, 1, TOKENS, "bfloat16", combine)
        self._fd = os.memfd_create("reply")
        os.ftruncate(self._fd, self.layout.reply_bytes)
        self.reply = ReplyMemory(self.layout, self._fd, writable=True)
        fields: dict[str, Any] = {
            "run_id": "r", "name": "n", "secret": "", "rank": 0, "world_size": 1, "incarnation": 1, "checkpoint": str(checkpoint),
            "shard_identity": {}, "device": "cuda:GPU-x", "cpus": [0, 1], "threads": 2, "backend": "native", "numerics": "reference",
            "dtype": "bfloat16", "combine": combine, "prefill_chunk": TOKENS, "transport": "zmq", "hub_address": "", "call_fd": -1,
            "reply_fd": -1, "request_bell_fd": -1, "reply_bell_fd": -1, "lifeline_fd": -1, "launcher_pid": 0, "cache_dir": str(folder),
            "card_cache_bytes": 0, "pin_budget_bytes": 1 << 40,
        }  # fmt: skip
        self.spec = spec = WorkerSpec(**(fields | options))
        self.beats = 0
        self.lane = CardLane(spec, self.checkpoint, self.reply, self._beat, lambda uuid: card)  # type: ignore[arg-type, return-value]
        self.cpu = CpuLane(spec, self.checkpoint.config, Rows(self.checkpoint), self._beat)

    def _beat(self) -> None:
        self.beats += 1

    def both(self, layer: int, tokens: int, experts: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """(from the card, from the CPU) for random tokens that draw from all experts."""
        config = self.checkpoint.config
        random = np.random.default_rng(layer * 100 + tokens)
        x = (random.standard_normal((tokens, config.hidden_size)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        k = config.num_experts_per_tok
        ids = np.stack([random.permutation(config.n_routed_experts)[:k] for _ in range(tokens)]).astype(np.int32)
        weights = random.uniform(0.1, 0.5, (tokens, k)).astype(np.float32)
        rows = int(np.isin(ids, experts).sum())
        out = self.reply.rows(rows) if self.layout.exact else self.reply.partial(tokens)
        assert self.lane.compute(layer, experts, x, ids, weights, out) == rows
        expected = np.empty_like(out)
        self.cpu.compute(layer, experts, x, ids, weights, expected)
        return out.copy(), expected

    def drawn(self, layer: int) -> list[int]:
        """The experts that the one token of `both` draws."""
        config = self.checkpoint.config
        random = np.random.default_rng(layer * 100 + 1)
        random.standard_normal((1, config.hidden_size))
        return random.permutation(config.n_routed_experts)[: config.num_experts_per_tok].tolist()

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def bench(kernels: Path) -> Iterator[Any]:
    made: list[Bench] = []

    def make(card: EmulatedCard | None = None, **options: Any) -> Bench:
        made.append(Bench(kernels, card or EmulatedCard(kernels), **options))
        return made[-1]

    yield make
    for b in made:
        b.close()


def close_to(got: np.ndarray, expected: np.ndarray) -> None:
    if got.dtype == np.uint16:
        got, expected = ((a.astype(np.uint32) << 16).view(np.float32) for a in (got, expected))
    assert np.linalg.norm(got - expected) <= 1e-3 * np.linalg.norm(expected)


ALL = list(range(24))


@pytest.mark.parametrize("combine", ["partial", "exact"])
@pytest.mark.parametrize("tokens", [1, 5, TOKENS])
def test_more_rows_than_the_staging_memory_holds(bench: Any, combine: str, tokens: int) -> None:
    b = bench(combine=combine)
    close_to(*b.both(3, tokens, ALL))
    assert b.lane.rung == "registered"
    assert b.lane.counts["registered"] == 24 * b.checkpoint.config.row_bytes


@pytest.mark.parametrize("combine", ["partial", "exact"])
def test_bits_do_not_depend_on_cache_eviction_or_rung(bench: Any, kernels: Path, combine: str) -> None:
    row = 1 << 14  # a slot of this geometry is smaller
    answers = []
    for options in ({"card_cache_bytes": 0}, {"card_cache_bytes": -1}, {"card_cache_bytes": 5 * row}, {"rungs": ["arena"]}):
        b = bench(combine=combine, **options)
        calls = [b.both(layer, tokens, experts)[0].tobytes() for layer, tokens, experts in
                 ((1, 1, [0, 7, 9]), (1, 4, ALL), (2, 1, [7, 9, 20]), (1, 1, [0, 7, 9]), (2, TOKENS, ALL[::2]))]  # fmt: skip
        answers.append(calls)
    assert all(a == answers[0] for a in answers)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    ("rungs", "phases"), [(["arena"], {"stage", "upload", "launch", "drain"}), (["registered"], {"upload", "launch", "drain"})]
)
def test_a_timeline_sees_every_part_of_a_call(bench: Any, tokens: int, rungs: list[str], phases: set[str]) -> None:
    b = bench(rungs=rungs)
    timeline = Timeline()
    timeline.wrap(b.lane.parts())
    close_to(*b.both(3, tokens, ALL))
    assert {span.phase for span in timeline.spans} == phases


def test_the_cache_saves_copies_and_counts(bench: Any) -> None:
    b = bench(card_cache_bytes=-1)
    b.both(1, 1, [3, 4])
    moved = b.lane.counts["registered"]
    b.both(1, 1, [3, 4])
    assert b.lane.counts["registered"] == moved
    assert (b.lane.counts["cache hits"], b.lane.counts["cache misses"]) == (2, 2)
    assert b.lane.counts["card"] == 2 * b.checkpoint.config.row_bytes


@pytest.mark.parametrize("combine", ["partial", "exact"])
def test_one_token_takes_the_native_way_and_gives_the_bits_of_the_other(
    bench: Any, kernels: Path, combine: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched = len(CALLED)
    b = bench(card_cache_bytes=-1, combine=combine)
    some = sorted([*b.drawn(1)[:3], next(e for e in ALL if e not in b.drawn(1))])
    b.both(1, 1, some)
    assert len(CALLED) == launched
    native, expected = b.both(1, 1, some)
    close_to(native, expected)
    assert len(CALLED) == launched + 1
    nothing = [e for e in ALL if e not in b.drawn(1)][:2]
    b.both(1, 1, nothing)
    got, _ = b.both(1, 1, nothing)
    assert not got.any()

    def missing(*_: Any) -> Any:
        raise NativeLibraryError("not built")

    monkeypatch.setattr("evrun.expert_worker.card.lane.NativeIssue", missing)
    b = bench(card_cache_bytes=-1, combine=combine)
    assert "a longer way" in caplog.text
    monkeypatch.undo()
    b.both(1, 1, some)
    np.testing.assert_array_equal(b.both(1, 1, some)[0], native)


def token(b: Bench, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, ids and weights of the one token of `both`."""
    config = b.checkpoint.config
    random = np.random.default_rng(layer * 100 + 1)
    x = (random.standard_normal((1, config.hidden_size)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    ids = random.permutation(config.n_routed_experts)[: config.num_experts_per_tok].astype(np.int32)[None]
    return x, ids, random.uniform(0.1, 0.5, ids.shape).astype(np.float32)


@pytest.mark.parametrize("combine", ["partial", "exact"])
def test_a_worker_serves_resident_rows_without_python(bench: Any, combine: str) -> None:
    b = bench(card_cache_bytes=-1, combine=combine)
    x, ids, weights = token(b, 1)
    some = sorted(b.drawn(1))
    out = b.reply.rows(len(some)) if b.layout.exact else b.reply.partial(1)
    assert serve(b.lane.short, 1, some, x, ids, weights, out) == -1  # nothing is on the card yet
    b.both(1, 1, some)
    expected, _ = b.both(1, 1, some)
    card, hits = b.lane.counts["card"], b.lane.counts["cache hits"]
    for number in range(1, 4):
        out[...] = 0
        assert serve(b.lane.short, 1, some, x, ids, weights, out) == len(some)
        np.testing.assert_array_equal(out, expected)
        assert b.lane.counts["card"] == card + number * len(some) * b.checkpoint.config.row_bytes
        assert b.lane.counts["cache hits"] == hits + number * len(some)
    for layer, experts in ((2, some), (1, [next(e for e in ALL if e not in some)]), (-1, some), (99, some)):
        assert serve(b.lane.short, layer, experts, x, ids, weights, out) == -1
    word = ctypes.c_uint32.from_address(b.lane._kernel.status_address)
    word.value = 1  # the kernels found something
    assert serve(b.lane.short, 1, some, x, ids, weights, out) == -1
    word.value = 0
    b.both(1, 1, some)
    assert b.lane.counts["cache hits"] == hits + 4 * len(some)  # the cache took note of all of them


@pytest.mark.parametrize("combine", ["partial", "exact"])
@pytest.mark.parametrize("cached", [0, 3])
def test_a_worker_brings_rows_in_without_python(bench: Any, kernels: Path, combine: str, cached: int) -> None:
    """With no cache, and with a full one: what is missing crosses the link, as often as it is missing."""
    b = bench(card_cache_bytes=cached * (1 << 14), combine=combine)
    held, row_bytes, counts = b.lane._ladder.cache.slots, b.checkpoint.config.row_bytes, b.lane.counts
    x, ids, weights = token(b, 1)
    some = sorted(b.drawn(1))
    out = b.reply.rows(len(some)) if b.layout.exact else b.reply.partial(1)
    assert serve(b.lane.short, 1, some, x, ids, weights, out) == -1  # nobody knows yet where these rows lie
    expected, _ = b.both(1, 1, some)
    moved, hits, misses = counts["registered"], counts["cache hits"], counts["cache misses"]
    missing = len(some) - held
    for number in range(1, 4):
        out[...] = 0
        assert serve(b.lane.short, 1, some, x, ids, weights, out) == len(some)
        np.testing.assert_array_equal(out, expected)
        assert counts["registered"] == moved + number * missing * row_bytes
        assert counts["cache hits"] == hits + number * held
        assert counts["cache misses"] == misses + number * (missing if held else 0)
    b.both(2, 1, some[:1])  # Python takes note
    assert (b.lane._ladder.cache.hits, b.lane._ladder.cache.misses) == (counts["cache hits"], counts["cache misses"])
    for few in (some[:1], some[1:3]):
        b.both(1, 1, few)
        whole = b.both(1, 1, few)[0]
        assert serve(b.lane.short, 1, few, x, ids, weights, out) == len(few)
        np.testing.assert_array_equal(out[: len(whole)], whole)


def test_rows_of_a_shard_that_was_let_go_are_pythons_again(bench: Any, kernels: Path) -> None:
    largest = max(p.stat().st_size for p in FULL.glob("*.safetensors"))
    b = bench(EmulatedCard(kernels), pin_budget_bytes=largest + 8192, card_cache_bytes=0)

    def native(layer: int) -> bool:
        return serve(b.lane.short, layer, sorted(b.drawn(layer)), *token(b, layer), b.reply.partial(1)) > 0

    shards = {layer: b.checkpoint.expert(layer, 0)[0].shard for layer in (1, 5, 9)}
    assert len(set(shards.values())) > 1
    for layer in (1, 5, 9, 1):
        b.both(layer, 1, sorted(b.drawn(layer)))
        assert [native(other) for other in shards] == [shards[other] == shards[layer] for other in shards]


def test_a_free_place_in_the_cache_is_pythons_to_fill(bench: Any) -> None:
    b = bench(card_cache_bytes=-1)
    some = sorted(b.drawn(1))
    b.both(1, 1, some[:2])
    assert serve(b.lane.short, 1, some, *token(b, 1), b.reply.partial(1)) == -1


def test_uses_that_nobody_took_note_of_send_a_call_to_python(bench: Any) -> None:
    b = bench(card_cache_bytes=-1)
    x, ids, weights = token(b, 1)
    some = sorted(b.drawn(1))
    b.both(1, 1, some)
    answers = [serve(b.lane.short, 1, some, x, ids, weights, b.reply.partial(1)) for _ in range(CAPACITY // len(some) + 1)]
    assert answers == [len(some)] * (CAPACITY // len(some)) + [-1]
    b.both(1, 1, some)
    assert serve(b.lane.short, 1, some, x, ids, weights, b.reply.partial(1)) == len(some)


def test_one_token_with_more_experts_than_it_draws(bench: Any) -> None:
    b = bench(card_cache_bytes=-1)
    first, _ = b.both(3, 1, ALL)
    again, expected = b.both(3, 1, ALL)
    close_to(again, expected)
    np.testing.assert_array_equal(again, first)


def test_a_driver_error_in_native_code_ends_the_worker(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench(card_cache_bytes=-1)
    b.both(1, 1, [1, 4, 8])
    monkeypatch.setattr(b.lane._one, "_call", lambda *_: -719)
    with pytest.raises(RunError, match=r"layer 1, experts 1 4 8: the card failed: evrun_card_call: CUDA_ERROR_LAUNCH_FAILED \(719\)"):
        b.both(1, 1, [1, 4, 8])


def test_a_driver_without_the_read_only_flag(bench: Any, kernels: Path) -> None:
    card = EmulatedCard(kernels, refuses=(rungs.REGISTER_PORTABLE | REGISTER_READ_ONLY,))
    b = bench(card)
    close_to(*b.both(1, 2, [1, 2]))
    assert b.lane.rung == "registered"


def test_a_driver_that_registers_no_file(bench: Any, kernels: Path, caplog: pytest.LogCaptureFixture) -> None:
    card = EmulatedCard(kernels, refuses=(rungs.REGISTER_PORTABLE | REGISTER_READ_ONLY, rungs.REGISTER_PORTABLE))
    b = bench(card)
    assert b.lane.rung == "arena"
    assert "every row costs a host copy" in caplog.text
    close_to(*b.both(1, 3, [1, 2]))
    assert b.lane.counts["arena"] == 2 * b.checkpoint.config.row_bytes
    with pytest.raises(DeviceError, match="arena"):
        bench(card, rungs=["registered"])


def test_the_pin_budget_is_kept_and_shards_are_let_go(bench: Any, kernels: Path) -> None:
    card = EmulatedCard(kernels)
    largest = max(p.stat().st_size for p in FULL.glob("*.safetensors"))
    b = bench(card, pin_budget_bytes=largest + 8192)
    own = card.registered  # the reply memory
    for layer in (1, 5, 9, 1):
        close_to(*b.both(layer, 2, [1, 2, 3]))
        assert card.registered - own <= largest + 8192
    assert b.lane.counts["arena"] == 0
    small = bench(EmulatedCard(kernels), pin_budget_bytes=4096)
    close_to(*small.both(1, 2, [1, 2]))
    assert small.lane.rung == "arena"


def test_a_bad_scale_is_named_also_in_the_middle_of_many_runs(bench: Any, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(FULL, copy)
    scale = next(t for t in Checkpoint.open(copy).expert(3, 2) if t.name.endswith("w2.scale"))
    with scale.shard.open("r+b") as shard:
        shard.seek(scale.offset + 4 * scale.data.shape[1])
        shard.write(b"\xff")
    b = bench(checkpoint=copy, card_cache_bytes=-1)
    for tokens, experts in ((1, [2]), (TOKENS, ALL)):
        with pytest.raises(PayloadError, match=rf"{scale.name} row 4.*found 255"):
            b.both(3, tokens, experts) if tokens > 1 else draw_two(b)
    close_to(*b.both(3, TOKENS, [e for e in ALL if e != 2]))


def draw_two(b: Bench) -> None:
    """One token that certainly draws expert 2 of layer 3."""
    config = b.checkpoint.config
    ids = np.array([[2, 3, 4, 5, 6, 7]], np.int32)
    x = np.full((1, config.hidden_size), 0x3F80, np.uint16)
    b.lane.compute(3, [2], x, ids, np.full(ids.shape, 0.3, np.float32), b.reply.partial(1))


def test_a_card_that_is_not_there_is_a_device_error(bench: Any) -> None:
    def missing(uuid: str) -> Any:
        raise UnavailableError("card GPU-x is not visible; visible: none")

    b = bench()
    with pytest.raises(DeviceError, match="GPU-x: card GPU-x is not visible"):
        CardLane(b.spec, b.checkpoint, b.reply, lambda: None, missing)


@pytest.mark.parametrize("refuses", [(), (REGISTER_PORTABLE | REGISTER_READ_ONLY, REGISTER_PORTABLE)])
def test_rates_of_a_card(kernels: Path, refuses: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What `evrun doctor` measures, by the same rungs and kernels."""
    monkeypatch.setattr(cuda, "CompilingDevice", lambda uuid: EmulatedCard(kernels, refuses))
    monkeypatch.setattr(card_rate, "KERNEL_CALLS", 2)
    monkeypatch.setattr(card_rate, "PASSES", (2, 4))
    config = Checkpoint.open(FULL).config
    shape = FfnShape(config.hidden_size, config.moe_intermediate_size, config.swiglu_limit, "reference", "bfloat16")
    wanted = Wanted("", [0], 1, [], 1, "native", "reference", "bfloat16", "fp8", 8, ["GPU-x"], 2, str(kernels), 0)
    rates, failed = card_rate.measure_all(wanted, shape, config)
    assert failed == {}
    found = rates["GPU-x"]
    assert (found.registered_bytes_per_s is None) == bool(refuses)
    assert found.arena_bytes_per_s
    assert found.experts.seconds(config.row_bytes, 1) > 0
    assert 0 < found.cache_bytes < 1 << 31
