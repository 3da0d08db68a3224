"""The rooms import each other one way only, and the light ones stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("bench", "demo", "launch", "coordinator", "expert_worker", "kernels")
ALLOWED = {
    "bench": ("evrun",),
    "demo": ("evrun",),
    "launch": ("evrun.launch", "evrun.coordinator.spec", "evrun.expert_worker.spec", "evrun.expert_worker.wire",
               "evrun.coordinator.engram_map", "evrun.coordinator.engram_hash", "evrun.kernels"),
    "coordinator": ("evrun.coordinator", "evrun.expert_worker.wire", "evrun.kernels"),
    "expert_worker": ("evrun.expert_worker", "evrun.kernels"),
    "expert_worker/wire": ("evrun.expert_worker.wire",),
    "kernels": ("evrun.kernels",),
}  # fmt: skip
TORCH_FREE = ("launch", "expert_worker")
KERNEL_FILES_WITH_TORCH = ("kernels/reference.py", "kernels/formats_torch.py", "kernels/bench_cpu.py")
FILES_WITH_TRITON = ("kernels/triton/sources.py", "kernels/triton/compiler.py")
"""What runs in the process of Triton's compiler, and nothing else."""
WIRE_LIBRARIES = {"msgpack", "numpy", "zmq"}


def imports(path: Path) -> set[str]:
    """Absolute names of what a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(str(node.module))
            found |= {f"{node.module}.{alias.name}" for alias in node.names if str(node.module).startswith("evrun")}
    return found


def files() -> list[Path]:
    return [p for room in ROOMS for p in sorted((ROOT / room).rglob("*.py"))]


def room_of(path: Path) -> str:
    relative = path.relative_to(ROOT).as_posix()
    return max((room for room in ALLOWED if relative.startswith(room + "/")), key=len)


@pytest.mark.parametrize("path", files(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_arrows(path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix()
    names = imports(path)
    room = room_of(path)
    for name in names:
        if name.startswith("evrun."):
            inside = any(name == a or name.startswith(a + ".") or a.startswith(name + ".") for a in ALLOWED[room])
            assert inside, f"{relative} imports {name}; {room} may import {ALLOWED[room]}"
    if room.split("/")[0] in TORCH_FREE or (room == "kernels" and not relative.startswith(KERNEL_FILES_WITH_TORCH)):
        assert not any(n == "torch" or n.startswith("torch.") for n in names), f"{relative} imports torch"
    if relative not in FILES_WITH_TRITON:
        assert not any(n.split(".")[0] == "triton" or n == "evrun.kernels.triton.sources" for n in names), f"{relative} imports triton"
    if room == "expert_worker/wire":
        outside = {n.split(".")[0] for n in names if not n.startswith("evrun")} - set(sys.stdlib_module_names)
        assert outside <= WIRE_LIBRARIES, f"{relative} imports {outside - WIRE_LIBRARIES}"
    assert "pickle" not in names, f"{relative} imports pickle"


@pytest.mark.parametrize(
    "module",
    ["evrun.launch.cli", "evrun.expert_worker.loop", "evrun.expert_worker.lane", "evrun.coordinator.spec", "evrun.kernels.registry",
     "evrun.kernels.native", "evrun.kernels.cuda", "evrun.kernels.triton", "evrun.coordinator.engram_map"],
)  # fmt: skip
def test_light_modules_import_no_torch(module: str) -> None:
    code = f"import sys, {module}; heavy = {{'torch', 'triton'}} & set(sys.modules); assert not heavy, heavy"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
