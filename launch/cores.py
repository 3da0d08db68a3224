"""Which process of a run gets which physical cores. Pure."""

from __future__ import annotations

from collections.abc import Sequence

Core = tuple[int, ...]
"""A physical core as its logical CPUs."""


def divide_cores(
    cores: Sequence[Core], world: int, own: int, nodes: Sequence[int | None] = (), wanted: Sequence[int | None] = ()
) -> tuple[list[list[Core]], str]:
    """(cores of the coordinator and of each rank, a remark).

    own     cores of the coordinator. The sums of its dense tree depend on the number of its threads, so this must not depend on
            the world: else no two worlds would print the same bytes
    nodes   memory node of each core; none where the system does not say
    wanted  the node next to each rank's card: what such a worker copies passes through its cores and their memory. None: any

    The ranks get equal shares of the rest, what is left over one each from the first on. With fewer cores than ranks each
    gets one, in turn, so that no process has more threads than cores.
    """
    rest = cores[own:]
    if len(rest) < world:
        ranks = [[cores[(i + 1) % len(cores)]] for i in range(world)]
        return [list(cores[:own]), *ranks], f"; {world + 1} processes share {len(cores)} core(s)"
    each, left = divmod(len(rest), world)
    sizes = [own, *(each + (i < left) for i in range(world))]
    if len(set(nodes)) > 1 and any(node in nodes for node in wanted if node is not None):
        return _beside_cards(cores, sizes, nodes, wanted)
    ends = [sum(sizes[: i + 1]) for i in range(world + 1)]
    return [list(cores[end - size : end]) for size, end in zip(sizes, ends, strict=True)], ""


def _beside_cards(
    cores: Sequence[Core], sizes: Sequence[int], nodes: Sequence[int | None], wanted: Sequence[int | None]
) -> tuple[list[list[Core]], str]:
    """Workers on cards choose first, then the coordinator, then the others; who finds too few beside its card fills up last."""
    free = list(range(len(cores)))
    taken: list[list[int]] = [[] for _ in sizes]

    def take(process: int, allowed: Sequence[int]) -> None:
        chosen = allowed[: sizes[process] - len(taken[process])]
        taken[process] += chosen
        free[:] = [i for i in free if i not in set(chosen)]

    for process, node in enumerate(wanted, 1):
        if node is not None:
            take(process, [i for i in free if nodes[i] == node])
    far = [process - 1 for process, node in enumerate(wanted, 1) if node is not None and len(taken[process]) < sizes[process]]
    for process in range(len(sizes)):
        take(process, free)
    remark = f"; not all beside their cards: {', '.join(f'rank {rank}' for rank in far)}" if far else "; workers beside their cards"
    return [[cores[i] for i in sorted(places)] for places in taken], remark


def coordinator_cores(cores: int, on_cards: bool) -> int:
    """How many of the cores the dense tree gets, whatever the world: half where cards compute the experts, else a quarter."""
    return max(1, cores // (2 if on_cards else 4))


def describe_shares(shares: Sequence[Sequence[tuple[int, ...]]]) -> str:
    """`coordinator 0-1, rank 0: 2, ...` by each core's first CPU."""
    named = [_ranges([core[0] for core in share]) for share in shares]
    return ", ".join([f"coordinator {named[0]}", *(f"rank {rank}: {cpus}" for rank, cpus in enumerate(named[1:]))])


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> `0-2,5`."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
