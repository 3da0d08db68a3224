from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evrun.expert_worker.wire.errors import UsageError
from evrun.launch import config, demo, settings
from evrun.launch.config import RequestConfig, RunConfig, generate_settings, launch_settings, run_name

RUN = {"checkpoint": "/c"}


@given(flag=st.none() | st.integers(1, 99), env=st.none() | st.integers(1, 99), file=st.none() | st.integers(1, 99))
def test_flag_before_environment_before_file_before_default(flag: int | None, env: int | None, file: int | None) -> None:
    flags = {"seed": None if flag is None else str(flag)}
    variables = {} if env is None else {"EVRUN_SEED": str(env)}
    in_file: dict[str, settings.Found] = {} if file is None else {"seed": (file, "f: seed")}
    merged = settings.merge({"seed"}, flags, variables, in_file)
    expected = next((v for v in (flag, env, file) if v is not None), 0)
    assert settings.parse(RequestConfig, merged).get("seed", 0) == expected


def test_every_setting_has_a_flag_a_variable_and_a_key(tmp_path: Path) -> None:
    for name in config.KNOWN:
        assert settings.merge(config.KNOWN, {name: "x"}, {}, {}) == {name: ("x", settings.flag(name))}
        assert settings.merge(config.KNOWN, {}, {settings.variable(name): "x"}, {}) == {name: ("x", settings.variable(name))}
        file = tmp_path / "f.toml"
        file.write_text(f'{name.replace("_", "-")} = "x"')
        assert settings.read_file(str(file), config.KNOWN)[name][0] == "x"


def test_defaults_stand_in_the_dataclass_alone() -> None:
    run, request = launch_settings(dict.fromkeys(config.KNOWN) | RUN, {})
    assert request is None
    assert run == RunConfig(checkpoint="/c")


BAD_RUN = """
world           0          an integer >= 1
world           -1         an integer >= 1
world           two        an integer
world           1e1        an integer
world           <empty>    an integer
device          gpu        one of auto, cpu, cuda
name            a/b        text that matches
name            ..         expected a name
prefill_chunk   0          an integer >= 1
max_context     0          an integer >= 1
stall_timeout   0          a finite number > 0
kill_timeout    nan        a finite number
workers         cuda0      devices with commas
workers         cpu,,cpu   devices with commas
checkpoint      <empty>    a path
deal            random     one of sorted, home
combine         <empty>    one of partial, exact
require         disk       one of card
transport       tcp        one of zmq, doorbell
"""
BAD_REQUEST = """
prompt          <empty>    not empty
prompt          <latin-1>  UTF-8
prompt_ids      <empty>    integers >= 0
prompt_ids      1,,2       integers >= 0
prompt_ids      1,-2       integers >= 0
max_new_tokens  0          an integer >= 1
max_new_tokens  -5         an integer >= 1
temperature     -0.1       a finite number >= 0
temperature     nan        a finite number >= 0
temperature     inf        a finite number >= 0
temperature     hot        a finite number >= 0
top_logits      -1         an integer >= 0
seed            x          an integer >= 0
stop            <empty>    not empty
dump_logits     /no/x/y    a file in a folder
dump_routes     /          a file in a folder
prompt_file     /no/file   a readable file
"""


def rows(table: str) -> list[tuple[str, str, str]]:
    words = {"<empty>": "", "<latin-1>": "\udcff"}
    found = [line.split(None, 2) for line in table.strip().splitlines()]
    return [(name, words.get(value, value), expected) for name, value, expected in found]


@pytest.mark.parametrize(("name", "value", "expected"), rows(BAD_RUN))
def test_bad_run_settings_name_source_value_and_what_is_expected(name: str, value: str, expected: str) -> None:
    for flags, env, source in (({name: value}, {}, settings.flag(name)), ({}, {settings.variable(name): value}, settings.variable(name))):
        with pytest.raises(UsageError) as caught:
            launch_settings(flags if name == "checkpoint" else RUN | flags, env)
        text = str(caught.value)
        assert text.startswith(source + ":")
        assert expected in text
        assert value in text
        assert "\n" not in text


@pytest.mark.parametrize(("name", "value", "expected"), rows(BAD_REQUEST))
def test_bad_request_settings(name: str, value: str, expected: str) -> None:
    prompt = {} if name.startswith("prompt") else {"prompt": "x"}
    with pytest.raises(UsageError, match=expected) as caught:
        generate_settings({name: (value,) if name == "stop" else value} | prompt, {})
    assert str(caught.value).startswith(settings.flag(name) + ":")


@given(st.floats())
def test_temperature_is_finite_and_not_negative_or_refused(value: float) -> None:
    flags = {"prompt": "x", "temperature": repr(value)}
    if math.isfinite(value) and value >= 0:
        assert generate_settings(flags, {})[1].temperature == value
    else:
        with pytest.raises(UsageError):
            generate_settings(flags, {})


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1))
def test_prompt_ids_are_taken_as_they_are(ids: list[int]) -> None:
    _, request = generate_settings({"prompt_ids": ",".join(map(str, ids))}, {})
    assert request.message().prompt_ids == ids
    assert request.message().prompt is None


def test_a_file_may_be_wrong_in_many_ways(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    for text, expected in (
        ("world = 'two'", "world: expected an integer"),
        ("world = true", "world: expected an integer"),
        ("wrld = 2", "'wrld' is no setting; known: "),
        ("max-context = 2\nmax_context = 3", "is there twice"),
        ("world = ", "expected a readable TOML file"),
        ("prompt-ids = [1, 'x']", "prompt-ids: expected integers"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=expected) as caught:
            launch_settings(RUN | {"config": str(file)}, {})
        assert str(file) in str(caught.value)
    with pytest.raises(UsageError, match="expected a readable TOML file"):
        launch_settings(RUN | {"config": str(tmp_path / "none.toml")}, {})


def test_a_file_gives_what_flags_and_environment_do_not(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('checkpoint = "/f"\nworkers = ["cpu", "cpu"]\nstall-timeout = 1\nstop = ["a", "b"]\nprompt = "x"\nignore-eos = true')
    run, request = launch_settings({}, {"EVRUN_CONFIG": str(file), "EVRUN_CHECKPOINT": "/e"})
    assert (run.checkpoint, run.workers, run.stall_timeout) == ("/e", ("cpu", "cpu"), 1.0)
    assert request is not None
    assert (request.stop, request.ignore_eos) == (("a", "b"), True)


def test_settings_that_contradict_each_other(tmp_path: Path) -> None:
    for flags, expected in (
        ({"world": "3", "workers": "cpu,cpu"}, r"--workers names 2 device\(s\), --world says 3"),
        ({"workers": "cpu,cuda:0", "device": "cpu"}, "--workers names a card, --device says cpu"),
        ({"stall_timeout": "5", "kill_timeout": "4"}, "--kill-timeout 4 is below --stall-timeout 5"),
        ({"prompt": "a", "prompt_ids": "1"}, "--prompt and --prompt-ids: expected one prompt, found 2"),
        ({"max_new_tokens": "3"}, "--max-new-tokens belongs to a request"),
        ({"json": True}, "--json belongs to a request"),
        ({"detach": True, "prompt": "a"}, "--detach with a prompt"),
        ({"prompt": "a", "dump_logits": f"{tmp_path}/x", "dump_routes": f"{tmp_path}/x"}, "is also the file of --dump-logits"),
    ):
        with pytest.raises(UsageError, match=expected):
            launch_settings(RUN | flags, {})
    with pytest.raises(UsageError, match="expected a prompt, found none"):
        generate_settings({}, {})


def test_demo_is_a_word_and_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch_settings({"checkpoint": "./demo"}, {})[0].checkpoint == str(tmp_path / "demo")
    for asked in ({"checkpoint": "demo"}, {}):
        assert launch_settings(asked, {})[0].checkpoint == str(demo.folder())
    monkeypatch.setattr(demo, "_ROOM", tmp_path)
    with pytest.raises(UsageError, match=r"expected the checkpoint that comes with evrun in .*, found nothing; install again"):
        launch_settings({}, {})


def test_a_prompt_file_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "p"
    file.write_bytes("né\r\n\n".encode())
    assert generate_settings({"prompt_file": str(file)}, {})[1].message().prompt == "né\r\n\n"
    for content, expected in ((b"", "is empty"), (b"\xff", "UTF-8")):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=expected):
            generate_settings({"prompt_file": str(file)}, {})


def test_a_run_config_survives_json() -> None:
    run, _ = launch_settings(RUN | {"workers": "cpu,cpu", "world": "2", "require": "in-place"}, {})
    assert RunConfig.load(run.dump()) == run


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().world = 2  # type: ignore[misc]


def test_names_and_stray_variables() -> None:
    assert run_name(None, {}) == "default"
    assert run_name(None, {"EVRUN_NAME": "x"}) == "x"
    assert run_name("y", {"EVRUN_NAME": "x"}) == "y"
    with pytest.raises(UsageError, match="EVRUN_NAME: expected"):
        run_name(None, {"EVRUN_NAME": "a/b"})
    assert config.unknown_variables({"EVRUN_WROLD": "2", "EVRUN_WORLD": "2", "EVRUN_CONFIG": "x", "PATH": ""}) == ["EVRUN_WROLD"]
