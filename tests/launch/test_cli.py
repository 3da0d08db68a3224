"""What the commands say and return without ever starting a process: one line each, the right exit code, nothing left."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import CHECKPOINT, REAL, World

from evrun.launch import cli
from evrun.launch.devices import Machine

LAUNCH = ["launch", "--checkpoint", str(CHECKPOINT)]
BAD = [
    ([*LAUNCH, "--world", "0"], 2, "--world: expected an integer >= 1"),
    ([*LAUNCH, "--world", "2", "--workers", "cpu"], 2, "--workers names 1 device(s), --world says 2"),
    ([*LAUNCH, "--prompt", ""], 2, "--prompt: expected text in UTF-8, not empty"),
    ([*LAUNCH, "--prompt-ids", ""], 2, "--prompt-ids: expected integers"),
    ([*LAUNCH, "--prompt-ids", "1,2,99999999"], 2, "the vocabulary, found 99999999 at position 2"),
    ([*LAUNCH, "--prompt", "a", "--max-new-tokens", "0"], 2, "--max-new-tokens: expected an integer >= 1, found '0'"),
    ([*LAUNCH, "--prompt", "a", "--max-new-tokens", "-3"], 2, "--max-new-tokens: expected an integer >= 1, found '-3'"),
    ([*LAUNCH, "--prompt", "a", "--temperature", "-1"], 2, "--temperature: expected a finite number >= 0, found '-1'"),
    ([*LAUNCH, "--prompt", "a", "--temperature", "nan"], 2, "--temperature: expected a finite number >= 0, found 'nan'"),
    ([*LAUNCH, "--max-context", "99999999"], 2, "the model's maximum, found 99999999"),
    ([*LAUNCH, "--prompt-ids", "1,2", "--max-context", "4", "--max-new-tokens", "3"], 2, "found prompt 2 tokens + 3 new = 5"),
    ([*LAUNCH, "--name", "../x"], 2, "--name: expected text that matches"),
    ([*LAUNCH, "--device", "cuda"], 4, "--device cuda: rank 0 cannot have a card"),
    ([*LAUNCH, "--workers", "cpu,cuda:5"], 4, "--workers cuda:5: rank 1 cannot have a card"),
    ([*LAUNCH, "--require", "registered"], 4, "--require registered: rank 0 runs on the CPU"),
    ([*LAUNCH, "--cpu-kernel", "best"], 2, "--cpu-kernel: expected auto or one of"),
    (["launch", "--checkpoint", "/no/such/folder"], 3, "expected a checkpoint directory, found nothing"),
    ([*LAUNCH, "--config", "/no/such/file"], 2, "expected a readable TOML file"),
    ([*LAUNCH, "--detach", "--prompt", "a"], 2, "--detach with a prompt"),
    ([*LAUNCH, "--no-such-flag"], 2, "No such option"),
    ([*LAUNCH, "--world"], 2, "requires an argument"),
    (["no-such-command"], 2, "No such command"),
    (["generate", "--prompt", "a"], 2, "no run named 'default'"),
    (["generate"], 2, "expected a prompt, found none"),
    (["ps", "--name", "x"], 2, "no run named 'x'"),
    (["stop"], 2, "no run named 'default'"),
    (["kill", "0"], 2, "no run named 'default'"),
    (["kill", "x"], 2, "RANK: expected an integer >= 0, found 'x'"),
    (["kill", "0", "--signal", "HUP"], 2, "--signal: expected one of TERM, KILL, STOP, CONT, found 'HUP'"),
    (["restart", "-1"], 2, "No such option"),
    (["logs", "0"], 2, "no log of worker-0"),
    (["logs", "everything"], 2, "expected a rank, coordinator, launcher or http, found 'everything'"),
    (["logs", "0", "--attempt", "0"], 2, "--attempt: expected an integer >= 1"),
]


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    made = World(REAL)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def in_process(here: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Commands run by `cli.main` in this process, in the world's environment."""
    for name, value in here.env.items():
        monkeypatch.setenv(name, value)
    return here


@pytest.mark.parametrize(("arguments", "exit_code", "words"), BAD, ids=lambda v: " ".join(v)[-40:] if isinstance(v, list) else None)
def test_bad_input(in_process: World, arguments: list[str], exit_code: int, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == exit_code
    out, err = capfd.readouterr()
    assert out == ""
    assert words in err
    if exit_code != 3:
        assert len(err.splitlines()) == 1, err
    assert err.startswith("evrun: ")
    assert in_process.leftovers() == []
    assert not (in_process.folder / "state" / "evrun").exists()


def test_bad_input_as_a_process(here: World) -> None:
    found = here.run(*LAUNCH, "--world", "0")
    assert (found.returncode, found.stdout, found.stderr) == (2, "", "evrun: --world: expected an integer >= 1 and <= 1024, found '0'\n")


def test_every_problem_of_a_checkpoint_is_listed(in_process: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, broken)
    shards = sorted(broken.glob("*.safetensors"))
    shards[0].write_bytes(b"")
    shards[1].unlink()
    assert cli.main(["launch", "--checkpoint", str(broken), "--prompt-ids", "1", "--json"]) == 3
    out, err = capfd.readouterr()
    assert out == ""
    assert str(shards[0]) in err
    assert str(shards[1]) in err
    assert "2 problem(s)" in err


def test_a_checkpoint_that_may_not_be_read(here: World, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir(mode=0o000)
    command = here.command("launch", "--checkpoint", str(folder))
    if os.geteuid() == 0:  # without these even root needs the permission
        if shutil.which("setpriv") is None:
            pytest.skip("root reads everything, and there is no setpriv to change that")
        rights = "-dac_override,-dac_read_search"
        command = ["setpriv", f"--inh-caps={rights}", f"--bounding-set={rights}", *command]
    found = subprocess.run(command, capture_output=True, text=True, env=here.env, timeout=60)
    folder.chmod(0o700)
    assert (found.returncode, found.stdout) == (3, "")
    assert f"{folder}: cannot be read (Permission denied); check its permissions" in found.stderr


def test_logs_that_cannot_be_written(in_process: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    (in_process.folder / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(in_process.folder / "file"))
    assert cli.main([*LAUNCH, "--device", "cpu"]) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert "log folder" in last
    assert "set XDG_STATE_HOME to a folder of yours" in last
    assert in_process.leftovers() == []


def test_too_little_memory(in_process: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("evrun.launch.channels.available_memory_bytes", lambda: 1 << 16)
    assert cli.main([*LAUNCH, "--device", "cpu"]) == 4
    assert "MiB needed, 0 MiB available" in capfd.readouterr().err.splitlines()[-1]
    assert in_process.leftovers() == []


def test_an_unexpected_error_is_one_line_and_a_file(
    in_process: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(env: object) -> Machine:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("evrun.launch.devices.look", broken)
    assert cli.main(LAUNCH) == 5
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "unexpected ZeroDivisionError: boom" in err
    assert "Traceback" in next(tmp_path.glob("evrun-error-*.log")).read_text()
    assert in_process.leftovers() == []


def test_settings_from_the_environment(in_process: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EVRUN_WORLD", "none")
    monkeypatch.setenv("EVRUN_CHECKPOINT", str(CHECKPOINT))
    assert cli.main(["launch"]) == 2
    assert capfd.readouterr().err == "evrun: EVRUN_WORLD: expected an integer >= 1 and <= 1024, found 'none'\n"


def test_help_lists_every_command_and_imports_none_of_them() -> None:
    code = (
        "import sys; from evrun.launch.cli import main; code = main(['--help']); heavy ="
        " {'torch', 'numpy', 'zmq', 'rich', 'msgpack', 'multiprocessing'} & set(sys.modules); assert not heavy, heavy; sys.exit(code)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert [name for name in cli.COMMANDS if f"  {name} " not in found.stdout] == []


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_of_the_table_is_there_and_explains_itself(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    assert f"Usage: evrun {name}" in capfd.readouterr().out


def test_the_launcher_never_imports_torch() -> None:
    modules = "evrun.launch.cli, evrun.launch.launcher, evrun.launch.supervise, evrun.launch.detach"
    names = ["launch", "generate", "ps", "logs", "control"]
    code = f"import sys, {modules}, {', '.join(f'evrun.launch.commands.{n}' for n in names)}; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_stdout_that_is_full_is_no_traceback(here: World) -> None:
    with open("/dev/full", "w") as full:
        found = subprocess.run(here.command("--version"), stdout=full, stderr=subprocess.PIPE, text=True, env=here.env, timeout=60)
    assert (found.returncode, found.stderr) == (5, "evrun: the answer cannot be written: No space left on device\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_no_exit_code(here: World, closed: str) -> None:
    command = shlex.join(here.command("ps", "--name", "nothing"))
    assert subprocess.run(["sh", "-c", f"exec {command} {closed}"], capture_output=True, env=here.env, timeout=60).returncode == 2


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capfd.readouterr().out.startswith("evrun")
