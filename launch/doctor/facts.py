"""The machine in figures, as the JSON has them. Nothing here raises for a machine that is merely poorer."""

from __future__ import annotations

import importlib
import os
import platform
import resource
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from evrun.kernels import registry
from evrun.launch import nodes
from evrun.launch.devices import ROOT, Machine, available_memory_bytes, cpu_quota, memory_limit_bytes

PACKAGES = ("evrun", "torch", "numpy", "pyzmq", "safetensors", "tokenizers", "nvidia-ml-py", "nvidia-cuda-nvrtc")
Facts = dict[str, Any]


def gather(machine: Machine, env: Mapping[str, str]) -> Facts:
    """Cards, CPUs, memory, limits, versions. `machine` is what `devices.look` found."""
    return {
        "cards": cards(machine),
        "no_card": "" if machine.cards else machine.no_card,
        "driver": driver_version() if machine.cards else None,
        "mps": mps(env),
        "cpu": cpu(machine),
        "numa_nodes": numa_nodes(),
        "memory": memory(),
        "versions": versions(),
    }


def cards(machine: Machine) -> list[Facts]:
    """Every visible card with what NVML says of its link. A question that a driver refuses is None."""
    if not machine.cards:
        return []
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        return [_card(nvml, card.index) | {"uuid": card.uuid, "name": card.name} for card in machine.cards]
    finally:
        nvml.nvmlShutdown()


def _card(nvml: Any, index: int) -> Facts:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, function)(handle, *arguments)
        except Exception:  # the library raises one class a code, and older ones lack functions
            return None

    memory, bus, capability = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetPciInfo"), ask("nvmlDeviceGetCudaComputeCapability")
    return {
        "index": index,
        "capability": list(capability) if capability else None,
        "memory_bytes": memory and int(memory.total),
        "free_bytes": memory and int(memory.free),
        "link_generation": ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        "link_width": ask("nvmlDeviceGetMaxPcieLinkWidth"),
        "link_generation_now": ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        "link_width_now": ask("nvmlDeviceGetCurrPcieLinkWidth"),
        "numa_node": bus and nodes.node_of(_text(bus.busId)),
    }


def driver_version() -> str | None:
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        return _text(nvml.nvmlSystemGetDriverVersion())
    finally:
        nvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def mps(env: Mapping[str, str]) -> Facts:
    """Whether NVIDIA's MPS daemon runs. Without it two processes on one card take turns at 0.35 ms a call; with it 0.09."""
    pipe = Path(env.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return {"running": (pipe / "control").exists(), "pipe_directory": str(pipe)}


def cpu(machine: Machine) -> Facts:
    """Cores that may be used, quota, kernel variants of this CPU."""
    return {
        "model": cpu_model(),
        "cores": [list(core) for core in machine.cores],
        "note": machine.cores_note,
        "quota": cpu_quota(),
        "logical": os.cpu_count(),
        "kernels": kernels(),
    }


def cpu_model(root: Path = ROOT) -> str:
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def kernels() -> list[Facts]:
    """The variants of the native library and whether this CPU can run them; one entry with the reason when there is none."""
    native = registry.module("native")
    reason = native.probe()
    if reason is not None:
        return [{"name": "native", "supported": False, "reason": reason}]
    return [{"name": f"native-{v.name}", "supported": v.supported, "reason": v.description} for v in native.variants()]


def numa_nodes(root: Path = ROOT) -> list[Facts]:
    """CPUs and memory of every node; empty where the kernel knows none."""
    found = []
    for node, cpus in nodes.cpus_by_node(root).items():
        try:
            lines = [line.split() for line in (root / f"sys/devices/system/node/node{node}/meminfo").read_text().splitlines()]
        except OSError:
            continue
        sizes = {line[2].rstrip(":"): int(line[3]) * 1024 for line in lines if len(line) > 3}
        found.append({"node": node, "cpus": cpus, "memory_bytes": sizes.get("MemTotal"), "free_bytes": sizes.get("MemFree")})
    return found


def memory(root: Path = ROOT) -> Facts:
    """Bytes: in all, free to use, what control groups leave, what may be locked (None: no limit)."""
    try:
        lines = [line.split() for line in (root / "proc/meminfo").read_text().splitlines()]
    except OSError:
        lines = []
    sizes = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if len(line) > 2}
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "total_bytes": sizes.get("MemTotal"),
        "available_bytes": available_memory_bytes(root),
        "cgroup_limit_bytes": memory_limit_bytes(root),
        "page_cache_bytes": sizes.get("Cached"),
        "locked_limit_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "root_ignores_limit": os.geteuid() == 0,
    }


def versions() -> dict[str, str | None]:
    """None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "linux": platform.release()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found
