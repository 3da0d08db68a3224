"""Memory nodes (NUMA): which CPUs belong to which, and next to which a card hangs."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")


def cpus_by_node(root: Path = ROOT) -> dict[int, list[int]]:
    """Node -> its logical CPUs, ascending; empty where the kernel knows no nodes."""
    found = {}
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda p: int(p.name[4:])):
        try:
            found[int(folder.name[4:])] = parse_cpu_list((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
    return found


def node_of(bus_id: str, root: Path = ROOT) -> int | None:
    """Node of a PCI device by its bus id, as NVML writes it (`00000000:3B:00.0`). None: the system does not say."""
    domain, _, rest = bus_id.lower().partition(":")
    try:
        node = int((root / f"sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def parse_cpu_list(text: str) -> list[int]:
    """`0-2,8` -> [0, 1, 2, 8]. Raises ValueError."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus
