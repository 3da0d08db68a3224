"""What this machine has: cards through NVML (never torch), cores and memory that this process may use.

Every question has an answer in words where the thing is missing; nothing here raises for a machine that is merely
poorer. Roots of the file system are arguments so that tests can describe other machines.
"""

from __future__ import annotations

import importlib
import os
import re
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evrun.expert_worker.wire.errors import UsageError
from evrun.launch import nodes
from evrun.launch.nodes import parse_cpu_list

ROOT = Path("/")
NO_LIMIT = 1 << 62
"""What version 1 of control groups says without a limit is more than this, rounded to pages."""


@dataclass(frozen=True)
class Card:
    """One card, in the order of the PCI bus."""

    index: int
    uuid: str
    """`GPU-...`, as CUDA_VISIBLE_DEVICES takes it."""
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    node: int | None = None
    """Memory node next to which it hangs, where the system says so."""


@dataclass(frozen=True)
class Machine:
    """Cards that may be used, cores that may be used."""

    cards: tuple[Card, ...]
    no_card: str
    """Why there are no (more) cards."""
    cores: tuple[tuple[int, ...], ...]
    """Physical cores, each as its logical CPUs, within affinity mask and quota."""
    cores_note: str
    """For people: mask and quota."""
    memory_bytes: int = 0
    """What may still be pinned: free memory, control groups and `ulimit -l` taken into account."""
    memory_note: str = ""
    core_nodes: tuple[int | None, ...] = ()
    """Memory node of each core; empty where the system knows none."""


def look(env: Mapping[str, str]) -> Machine:
    """Raises UsageError for a CUDA_VISIBLE_DEVICES that names no card or one card twice."""
    cards, reason = find_cards()
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if cards and listed is not None:
        cards = visible_cards(cards, listed)
        reason = f"CUDA_VISIBLE_DEVICES={listed} leaves {len(cards)} card(s)"
    mask = sorted(os.sched_getaffinity(0))
    quota = cpu_quota()
    cores = usable_cores(physical_cores(mask), quota)
    note = f"{len(mask)} CPUs in the affinity mask, quota {'none' if quota is None else f'{quota:g} CPUs'}"
    memory_bytes, memory_note = lockable_memory_bytes()
    node_of = {cpu: node for node, cpus in nodes.cpus_by_node().items() for cpu in cpus}
    core_nodes = tuple(node_of.get(core[0]) for core in cores) if node_of else ()
    return Machine(tuple(cards), reason, tuple(cores), note, memory_bytes, memory_note, core_nodes)


def find_cards() -> tuple[list[Card], str]:
    """(cards, why there are none or no more)."""
    if not os.path.exists("/dev/nvidiactl") and not os.path.exists("/proc/driver/nvidia/version"):
        return [], "no driver (no /dev/nvidiactl)"
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        return [], f"the NVML module cannot be imported ({error}); install nvidia-ml-py"
    try:
        nvml.nvmlInit()
    except Exception as error:
        return [], f"NVML does not start ({error})"
    try:
        cards = [_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except Exception as error:
        return [], f"NVML cannot list the cards ({error})"
    finally:
        nvml.nvmlShutdown()
    return cards, f"this machine has {len(cards)} card(s)"


def _card(nvml: Any, index: int) -> Card:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
    node = nodes.node_of(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
    return Card(index, uuid, name, int(memory), (int(major), int(minor)), node)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible_cards(cards: list[Card], listed: str) -> list[Card]:
    """Cards that CUDA_VISIBLE_DEVICES lets through, in its order: numbers, UUIDs or their beginnings; empty lets none through.

    Raises UsageError for an entry that is no card, fits several, or is there twice.
    """
    chosen: list[Card] = []
    for entry in filter(None, (part.strip() for part in listed.split(","))):
        found = [c for c in cards if (str(c.index) == entry if entry.isdigit() else c.uuid.startswith(entry))]
        if len(found) != 1:
            known = ", ".join(f"{c.index} = {c.uuid}" for c in cards)
            raise UsageError(f"CUDA_VISIBLE_DEVICES={listed}: {entry!r} fits {len(found)} cards, expected one of {known}")
        if found[0] in chosen:
            raise UsageError(f"CUDA_VISIBLE_DEVICES={listed}: {entry!r} is there twice ({found[0].uuid}); list each card once")
        chosen.append(found[0])
    return chosen


def physical_cores(mask: list[int], root: Path = ROOT) -> list[tuple[int, ...]]:
    """The CPUs of `mask` grouped by physical core, in the order of each core's first CPU."""
    cores: dict[frozenset[int], list[int]] = {}
    for cpu in mask:
        try:
            text = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
            siblings = frozenset(parse_cpu_list(text)) or frozenset({cpu})
        except (OSError, ValueError):
            siblings = frozenset({cpu})
        cores.setdefault(siblings, []).append(cpu)
    return [tuple(cpus) for cpus in cores.values()]


def usable_cores(cores: list[tuple[int, ...]], quota: float | None) -> list[tuple[int, ...]]:
    """As many cores as the quota pays for, at least one."""
    return cores if quota is None else cores[: max(1, int(quota))]


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs that the control groups of this process allow (v1 and v2, all levels), or None."""
    quotas = []
    for folder, version in _cgroup_levels("cpu", root):
        try:
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = (folder / "cpu.cfs_quota_us").read_text(), (folder / "cpu.cfs_period_us").read_text()
            if quota != "max" and int(quota) > 0:
                quotas.append(int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return min(quotas, default=None)


def available_memory_bytes(root: Path = ROOT) -> int:
    """What may still be allocated: MemAvailable, or what a control group leaves (its page cache can be given back)."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    free = [int(match.group(1)) * 1024] if match else []
    for folder, version in _cgroup_levels("memory", root):
        limit, used = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        try:
            text = (folder / limit).read_text().strip()
            if text == "max":
                continue
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            prefix = "" if version == 2 else "total_"
            cache = int(stat.get(prefix + "inactive_file", 0)) + int(stat.get(prefix + "active_file", 0))
            free.append(max(0, int(text) - int((folder / used).read_text()) + cache))
        except (OSError, ValueError):
            continue
    return min(free, default=1 << 62)


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """The smallest memory limit of the control groups of this process, page cache included; None: no limit."""
    limits = []
    for folder, version in _cgroup_levels("memory", root):
        try:
            text = (folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).read_text().strip()
            limits.append(int(text) if text != "max" else NO_LIMIT)
        except (OSError, ValueError):
            continue
    smallest = min(limits, default=NO_LIMIT)
    return smallest if smallest < NO_LIMIT else None


def lockable_memory_bytes(root: Path = ROOT) -> tuple[int, str]:
    """(what may be pinned, for people: what limits it). Root is not held by `ulimit -l`."""
    available = available_memory_bytes(root)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY or os.geteuid() == 0 or locked >= available:
        return available, f"{available / 2**30:.1f} GiB of memory available"
    return locked, f"ulimit -l allows {locked / 2**30:.2f} GiB; raise it to register more"


def _cgroup_levels(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """(folder, version) of every control group that limits this process, innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        hierarchy, controllers, path = (*line.split(":", 2), "", "")[:3]
        if hierarchy == "0" and not controllers:
            tops = [(mount, 2), (mount / "unified", 2)]
        elif controller in controllers.split(","):
            tops = [(mount / controllers, 1)] if (mount / controllers).is_dir() else [(mount / controller, 1)]
        else:
            continue
        for top, version in tops:
            inner = Path(path.lstrip("/"))
            for level in (inner, *inner.parents):
                if (top / level).is_dir():
                    yield top / level, version
