from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evrun.expert_worker.wire.errors import UsageError
from evrun.launch import devices
from evrun.launch.devices import Card, available_memory_bytes, cpu_quota, physical_cores, usable_cores, visible_cards
from evrun.launch.nodes import parse_cpu_list

CARDS = [Card(i, f"GPU-{uuid}", "H", 1, (9, 0)) for i, uuid in enumerate(("abcd", "abff", "0123"))]


def test_look_here() -> None:
    machine = devices.look({})
    assert machine.cores
    assert machine.cards or machine.no_card


@pytest.mark.parametrize(
    ("listed", "indices"), [("0,2", [0, 2]), ("2,0", [2, 0]), ("GPU-0,1", [2, 1]), ("GPU-abff", [1]), ("", []), (" 1 ", [1])]
)
def test_visible_cards_by_number_and_by_uuid(listed: str, indices: list[int]) -> None:
    assert [c.index for c in visible_cards(CARDS, listed)] == indices


@pytest.mark.parametrize(
    ("listed", "words"), [("0,0", "twice"), ("1,GPU-abff", "twice"), ("7", "fits 0"), ("GPU-ab", "fits 2"), ("-1", "fits 0")]
)
def test_visible_cards_refused(listed: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        visible_cards(CARDS, listed)


def test_cards_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"open": 0}
    nvml = SimpleNamespace(
        nvmlInit=lambda: state.update(open=1),
        nvmlShutdown=lambda: state.update(open=0),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetCudaComputeCapability=lambda h: (9, h),
        nvmlDeviceGetMemoryInfo=lambda h: SimpleNamespace(total=5),
        nvmlDeviceGetUUID=lambda h: f"GPU-{h}".encode(),
        nvmlDeviceGetName=lambda h: "card",
        nvmlDeviceGetPciInfo=lambda h: SimpleNamespace(busId=f"00000000:F{h}:1F.7".encode()),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(devices.os.path, "exists", lambda path: True)
    cards, _ = devices.find_cards()
    assert cards == [Card(0, "GPU-0", "card", 5, (9, 0)), Card(1, "GPU-1", "card", 5, (9, 1))]
    assert state == {"open": 0}
    assert devices.look({"CUDA_VISIBLE_DEVICES": ""}).cards == ()

    def broken() -> None:
        raise RuntimeError("driver too old")

    nvml.nvmlInit = broken
    assert devices.find_cards() == ([], "NVML does not start (driver too old)")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py" in devices.find_cards()[1]


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.os.path, "exists", lambda path: False)
    assert devices.find_cards() == ([], "no driver (no /dev/nvidiactl)")


def test_physical_cores_are_groups_of_siblings(tmp_path: Path) -> None:
    for cpu, siblings in ((0, "0,4"), (1, "1,5"), (4, "0,4"), (5, "1,5")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert physical_cores([0, 1, 4, 5, 9], tmp_path) == [(0, 4), (1, 5), (9,)]
    assert physical_cores([4, 5], tmp_path) == [(4,), (5,)]


@given(st.sets(st.integers(0, 300), min_size=1))
def test_cpu_lists(cpus: set[int]) -> None:
    assert parse_cpu_list(",".join(map(str, sorted(cpus))) + "\n") == sorted(cpus)


def test_cpu_list_ranges() -> None:
    assert parse_cpu_list("0-2,8") == [0, 1, 2, 8]


def test_quota_limits_cores() -> None:
    cores = [(c,) for c in range(8)]
    assert usable_cores(cores, None) == cores
    assert usable_cores(cores, 2.5) == cores[:2]
    assert usable_cores(cores, 0.5) == cores[:1]


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_control_groups_version_2(tmp_path: Path) -> None:
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    1000 kB\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/a/memory.max": "500000\n",
            "sys/fs/cgroup/a/memory.current": "480000\n",
            "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 100000\nactive_file 50000\n",
        },
    )
    assert cpu_quota(tmp_path) == 2.5
    assert devices.memory_limit_bytes(tmp_path) == 500000
    assert available_memory_bytes(tmp_path) == 500000 - 480000 + 150000


def test_control_groups_version_1(tmp_path: Path) -> None:
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/m\n3:cpu,cpuacct:/\n1:name=systemd:/x\n",
            "proc/meminfo": "MemAvailable:    1000 kB\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/m/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/m/memory.usage_in_bytes": "1\n",
            "sys/fs/cgroup/memory/m/memory.stat": "total_inactive_file 1\n",
        },
    )
    assert cpu_quota(tmp_path) == 1.5
    assert devices.memory_limit_bytes(tmp_path) is None
    assert available_memory_bytes(tmp_path) == 1000 * 1024


def test_no_control_groups(tmp_path: Path) -> None:
    _write(tmp_path, {"proc/meminfo": "MemAvailable: 7 kB\n"})
    assert cpu_quota(tmp_path) is None
    assert devices.memory_limit_bytes(tmp_path) is None
    assert available_memory_bytes(tmp_path) == 7 * 1024
