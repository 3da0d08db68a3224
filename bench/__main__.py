"""`python -m evrun.bench NAME ...`: what `evrun bench` runs, in a process that may import torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import click

from evrun.bench import report
from evrun.bench.parity.command import command as parity_command
from evrun.bench.step.command import command as step_command
from evrun.coordinator.deal import POLICIES
from evrun.expert_worker.wire.errors import EvrunError
from evrun.kernels.cuda.errors import DeviceError, UnavailableError

CPU_TOKENS, CARD_TOKENS = "1,4,8,16,32,64,128,256", "1,4,16,64,512,4096"
as_json = click.option("--json", "as_json", is_flag=True, help="One object on stdout.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure; every figure beside its floor."""


@bench.command()
@click.option("--workers", default="cpu", show_default=True, help="As in cuda:0,cuda:1: kernels on the first, a call split over all.")
@click.option("--tokens", help=f"Tokens on one expert (cpu; default {CPU_TOKENS}), or of a call (cuda; default {CARD_TOKENS}).")
@click.option("--threads", default="1", show_default=True, help="Thread counts, as in 1,2.")
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(min=3))
@click.option("--numerics", type=click.Choice(["reference", "weights-only"]), default="reference", show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--memory", default="anonymous", show_default=True, help="anonymous, mapped, or both with a comma.")
@click.option("--cpu-kernel", default="auto", show_default=True, help="auto: the fastest here; or names, as in native-avx2,native-avx512.")
@click.option("--gpu-kernel", default="auto", show_default=True, help="On a card: auto, cuda or triton.")
@click.option("--no-baseline", is_flag=True, help="Leave torch's dequantise-then-matmul out; it takes most of the time.")
@as_json
def kernel(
    workers: str, tokens: str | None, threads: str, rounds: int, numerics: Literal["reference", "weights-only"],
    dtype: Literal["bfloat16", "float32"], memory: str, cpu_kernel: str, gpu_kernel: str, no_baseline: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Kernels over packed rows, beside a plain read of the same bytes."""
    if workers != "cpu":
        from evrun.bench import card_kernel, card_split, devices
        from evrun.kernels import registry

        if gpu_kernel not in ("auto", *registry.card_names()):
            expected = f"expected auto or one of {', '.join(registry.card_names())}"
            raise click.BadParameter(f"{expected}, found {gpu_kernel!r}", param_hint="--gpu-kernel")
        try:
            sibling, passed_over = registry.choose_card(gpu_kernel)
        except registry.UnknownBackendError as error:
            raise UnavailableError(str(error)) from None
        uuids = devices.uuids(workers.split(","))
        wanted = card_kernel.cases([int(t) for t in (tokens or CARD_TOKENS).split(",")])
        wanted = [case._replace(numerics=numerics, dtype=dtype) for case in wanted]
        for line in passed_over:
            click.echo(f"not used: {line}", err=True)
        kernels = registry.card_module(sibling)
        rows = card_kernel.run(kernels.CompilingDevice(uuids[0]), wanted, devices.CACHE, kernels)
        if sibling == "cuda":
            rows += card_split.run(uuids, devices.CACHE)
        report.show("kernel", rows, as_json)
        return
    from evrun.kernels import bench_cpu, native

    known = {f"native-{v.name}": v.name for v in native.variants() if v.supported}
    names = [] if cpu_kernel == "auto" else cpu_kernel.split(",")
    if not known.keys() >= set(names):
        raise click.BadParameter(f"expected auto or some of {', '.join(known)}, found {cpu_kernel!r}", param_hint="--cpu-kernel")
    work = bench_cpu.Work(numerics=numerics, dtype=dtype)
    kinds: Any = memory.split(",")
    rows = bench_cpu.run(
        work,
        [int(t) for t in (tokens or CPU_TOKENS).split(",")],
        [int(t) for t in threads.split(",")],
        rounds,
        kinds,
        variants=[known[name] for name in names] or None,
        baseline=not no_baseline,
        progress=lambda line: click.echo(line, err=True),
    )
    report.show("kernel", rows, as_json)


@bench.command()
@click.option("--world", "worlds", default="1,2,4,8", show_default=True, help="Worker counts.")
@click.option("--calls", default=3000, show_default=True, type=click.IntRange(min=10))
@as_json
def ipc(worlds: str, calls: int, as_json: bool) -> None:
    """Round trip of a layer call with an empty kernel."""
    from evrun.bench import ipc as module

    report.show("ipc", module.run([int(w) for w in worlds.split(",")], calls), as_json)


@bench.command()
@click.option("--checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Default: one of full-size rows.")
@click.option("--workers", default="cpu", show_default=True, help="Devices, as in cuda:0,cuda:1.")
@click.option("--tokens", default="1,64", show_default=True)
@click.option("--calls", default=60, show_default=True, type=click.IntRange(min=5))
@click.option("--deal", type=click.Choice(list(POLICIES)), default="sorted", show_default=True)
@click.option("--only-resident", is_flag=True, help="Leave out rows that must come to the card.")
@as_json
def layer(checkpoint: Path | None, workers: str, tokens: str, calls: int, deal: str, only_resident: bool, as_json: bool) -> None:
    """Whole layer calls through real workers, phase by phase."""
    from evrun.bench import layer as module

    rows = module.run(checkpoint, workers.split(","), [int(t) for t in tokens.split(",")], calls, deal, only_resident)
    report.show("layer", rows, as_json)


@bench.command()
@click.option("--cards", default="0", show_default=True, help="Visible cards, as in 0,1.")
@as_json
def link(cards: str, as_json: bool) -> None:
    """Host to card: pinned memory and registered file mapping, each card alone and all together."""
    from evrun.bench import link as module

    report.show("link", module.run([int(c) for c in cards.split(",")]), as_json)


@bench.command()
@click.option("--card", default=0, show_default=True)
@as_json
def stage(card: int, as_json: bool) -> None:
    """Page cache into pinned memory: threads, fresh pins, cold against warm."""
    from evrun.bench import stage as module

    report.show("stage", module.run(card), as_json)


@bench.command()
@click.option("--checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Default: the built-in demo.")
@click.option("--workers", default="cpu", show_default=True, help="A device that all workers share, as in cuda:0.")
@click.option("--world", "worlds", default="1,4", show_default=True, help="Worker counts.")
@click.option("--deals", default="sorted,home", show_default=True)
@click.option("--numerics", "numerics", default="reference,weights-only", show_default=True)
@click.option("--cpu-kernel", default="auto", show_default=True, help="auto: all that run here; or names, as in native-avx2,torch.")
@click.option("--first", type=click.IntRange(min=1), help="Only so many questions.")
@as_json
def demo(
    checkpoint: Path | None, workers: str, worlds: str, deals: str, numerics: str, cpu_kernel: str, first: int | None, as_json: bool
) -> None:
    """The demo's questions: how many are answered right, however it runs."""
    from evrun.bench import demo as module
    from evrun.bench import devices
    from evrun.demo.data.facts import load_questions
    from evrun.kernels import native
    from evrun.launch.demo import folder, questions

    cpu = [*(f"native-{v.name}" for v in native.variants() if v.supported), "torch"] if native.probe() is None else ["torch"]
    if cpu_kernel != "auto":
        if not set(cpu_kernel.split(",")) <= set(cpu):
            raise click.BadParameter(f"expected auto or some of {', '.join(cpu)}, found {cpu_kernel!r}", param_hint="--cpu-kernel")
        cpu = cpu_kernel.split(",")
    device, backends = ("cpu", cpu) if workers == "cpu" else (f"cuda:{devices.uuids([workers])[0]}", ["cuda"])
    cases = [
        module.Case(device, backend, deal, int(world), arithmetic)
        for arithmetic in numerics.split(",")
        for backend in backends
        for world in worlds.split(",")
        for deal in deals.split(",")
    ]
    report.show("demo", module.run(checkpoint or folder(), load_questions(questions())[:first], cases), as_json)


bench.add_command(parity_command)
bench.add_command(step_command)


def main() -> int:
    """As `evrun.launch.cli.main`: errors are one line."""
    try:
        bench.main(prog_name="evrun bench", standalone_mode=False)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        click.echo(f"evrun: {error.format_message()}; see --help", err=True)
        return 2
    except EvrunError as error:
        click.echo(f"evrun: {error}", err=True)
        return error.exit_code
    except (UnavailableError, DeviceError) as error:
        click.echo(f"evrun: {error}", err=True)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
