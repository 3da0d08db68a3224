"""What a run and a request are: merged from flags, environment, file and defaults, checked once, then frozen.

Anything wrong is a UsageError that names the source. `auto` values (world, max_context) stay None here and are
replaced in `launch.plan`, where devices and the model's config are known.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evrun.expert_worker.wire.errors import UsageError
from evrun.expert_worker.wire.requests import Generate
from evrun.kernels import registry
from evrun.launch import demo, settings
from evrun.launch.settings import (
    CheckpointPath,
    Choice,
    Devices,
    FilePath,
    Found,
    Integer,
    Integers,
    Number,
    Pattern,
    Size,
    Switch,
    Text,
    Texts,
    setting,
)

DEFAULT_NAME = "default"
NAME_REGEX = r"[A-Za-z0-9._-]{1,32}"
NAME = Pattern("NAME", NAME_REGEX)
RUNGS = ("card", "registered", "arena", "in-place")
"""Where rows come from, best first."""


def check_name(value: str, source: str = "--name") -> str:
    """A run's name, which is also a folder's. Raises UsageError."""
    if value in (".", ".."):
        raise UsageError(f"{source}: expected a name, found {value!r}, which is a folder of the file system; choose another")
    try:
        return NAME.parse(value)
    except settings.NotThisError as error:
        raise UsageError(f"{source}: expected {error}, found {value!r}") from None


@dataclass(frozen=True)
class RunConfig:
    """One run, as asked for. None means: the plan decides."""

    checkpoint: str = setting("demo", CheckpointPath(), "Folder of a checkpoint in the release's format; `demo`: the small one of evrun.")
    world: int | None = setting(None, Integer(minimum=1, maximum=1024), "Workers. Default: the cards found, else 4.")
    device: str = setting("auto", Choice("KIND", ("auto", "cpu", "cuda")), "auto: a card for each rank where it works, else the CPU.")
    workers: tuple[str, ...] = setting((), Devices(), "The device of each rank, as in cuda:0,cuda:1,cpu.")
    coordinator: str = setting("cpu", Pattern("DEV", r"cpu|cuda:[0-9]{1,3}"), "Where the dense tree runs: cpu, or cuda:K.")
    name: str = setting(DEFAULT_NAME, NAME, "Name of the run.")
    detach: bool = setting(False, Switch(), "Return when every rank serves; the run stays in the background.")
    deal: str = setting("sorted", Choice("POLICY", ("sorted", "home")), "How experts are dealt to ranks.")
    combine: str = setting("partial", Choice("HOW", ("partial", "exact")), "exact: the same bytes for every world and after any restart.")
    numerics: str = setting("reference", Choice("HOW", ("reference", "weights-only")), "weights-only leaves the activations unrounded.")
    dtype: str = setting("bfloat16", Choice("DTYPE", ("bfloat16", "float32")), "Values between operations.")
    dense_dtype: str = setting("fp8", Choice("DTYPE", ("fp8", "bfloat16")), "How the dense weights are held.")
    cpu_kernel: str = setting("auto", Pattern("NAME", r"[a-z0-9_-]{1,32}"), "Expert kernel of CPU workers.")
    gpu_kernel: str = setting("auto", Choice("NAME", ("auto", *registry.card_names())), "Expert kernel of workers on cards.")
    prefill_chunk: int = setting(512, Integer(minimum=1, maximum=1 << 20), "Most tokens of one prefill piece.")
    max_context: int | None = setting(None, Integer(minimum=1), "Most positions of a request. Default: the model's maximum, at most 32768.")
    on_loss: str = setting("elastic", Choice("HOW", ("elastic", "wait")), "After a loss: deal again at once, or wait for the restart.")
    card_cache: int | None = setting(None, Size(), "Card memory for rows that stay, per worker (0: none). Default: what is free.")
    pin_budget: int | None = setting(None, Size(), "Most bytes of shards registered with the driver. Default: what memory allows.")
    require: str | None = setting(None, Choice("RUNG", RUNGS), "Fail where rows come from a lower rung than this.")
    stall_timeout: float = setting(2.0, Number("S", above=True), "Seconds without progress until a rank's work is dealt again.")
    kill_timeout: float = setting(30.0, Number("S", above=True), "Seconds without progress until a rank is killed and restarted.")
    start_timeout: float = setting(600.0, Number("S", above=True), "The same while a process starts.")
    first_call_timeout: float = setting(60.0, Number("S", above=True), "The same as --stall-timeout for the first call of a process.")
    transport: str = setting("doorbell", Choice("HOW", ("zmq", "doorbell")), "How calls travel to the workers.")
    check_payload: bool = setting(False, Switch(), "CRC-32 of every partial, made and checked: about 1 ns a byte at each end.")
    log_level: str = setting("INFO", Choice("LEVEL", ("DEBUG", "INFO", "WARNING", "ERROR")), "Least level that is logged.")
    faults: str | None = setting(None, FilePath(), "Scripted faults, for tests only.", hidden=True)

    @classmethod
    def of(cls, merged: Mapping[str, Found]) -> RunConfig:
        """Raises UsageError."""
        config = cls(**settings.parse(cls, merged))
        source = {name: where for name, (_, where) in merged.items()}
        check_name(config.name, source.get("name", "--name"))
        if config.checkpoint == "demo":
            config = dataclasses.replace(config, checkpoint=str(demo.folder()))
        if config.workers and config.world is not None and config.world != len(config.workers):
            named = f"{source['workers']} names {len(config.workers)} device(s)"
            raise UsageError(f"{named}, {source['world']} says {config.world}; leave one out or make them agree")
        if config.workers and config.device == "cpu" and set(config.workers) != {"cpu"}:
            raise UsageError(f"{source['workers']} names a card, {source['device']} says cpu; leave one out")
        if config.kill_timeout < config.stall_timeout:
            both = f"--kill-timeout {config.kill_timeout:g} is below --stall-timeout {config.stall_timeout:g}"
            raise UsageError(f"{both}; a rank must be stalled before it is killed")
        return config

    def dump(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def load(cls, text: str) -> RunConfig:
        raw = json.loads(text)
        return cls(**{**raw, "workers": tuple(raw["workers"])})


@dataclass(frozen=True)
class RequestConfig:
    """One request. After `of`, exactly one of `prompt` and `prompt_ids` is set; `prompt_file` has been read."""

    prompt: str | None = setting(None, Text(), "Text to continue.")
    prompt_file: str | None = setting(None, FilePath(), "File with the text to continue, UTF-8, taken as it is.")
    prompt_ids: tuple[int, ...] = setting((), Integers(), "Token ids to continue, taken as they are.")
    no_bos: bool = setting(False, Switch(), "Do not put the begin-of-sequence token before the text.")
    max_new_tokens: int = setting(128, Integer(minimum=1), "Most tokens to generate.")
    temperature: float = setting(0.0, Number("T"), "0: always the likeliest token.")
    seed: int = setting(0, Integer(), "Of the sampling.")
    stop: tuple[str, ...] = setting((), Texts(), "Stop before this text; may be repeated.")
    ignore_eos: bool = setting(False, Switch(), "Go on after the end-of-sequence token.")
    json: bool = setting(False, Switch(), "One JSON object on stdout instead of the text.")
    top_logits: int = setting(0, Integer("K", maximum=1000), "Report the K best candidates of each token (with --json).")
    dump_logits: str | None = setting(None, FilePath("F.safetensors"), "Write the logits of every position.")
    dump_routes: str | None = setting(None, FilePath("F.safetensors"), "Write the experts and weights of every position and layer.")
    dump_activations: str | None = setting(None, FilePath("F.safetensors"), "Write input and routed output of every MoE layer.")

    @classmethod
    def of(cls, merged: Mapping[str, Found]) -> RequestConfig | None:
        """None when no prompt is given anywhere. Raises UsageError, also for an unreadable prompt file."""
        prompts = [merged[name][1] for name in ("prompt", "prompt_file", "prompt_ids") if name in merged]
        if not prompts:
            return None
        if len(prompts) > 1:
            raise UsageError(f"{' and '.join(prompts)}: expected one prompt, found {len(prompts)}; leave all but one out")
        config = cls(**settings.parse(cls, merged))
        config._check_dumps(merged)
        if config.prompt_file is not None:
            config = dataclasses.replace(config, prompt=_read_prompt(config.prompt_file, prompts[0]))
        return config

    def _check_dumps(self, merged: Mapping[str, Found]) -> None:
        seen: dict[str, str] = {}
        for name in ("dump_logits", "dump_routes", "dump_activations"):
            path = getattr(self, name)
            if path is None:
                continue
            source = merged[name][1]
            if path in seen:
                raise UsageError(f"{source}: {path} is also the file of {seen[path]}; give each its own")
            seen[path] = source
            folder = os.path.dirname(path)
            if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
                raise UsageError(f"{source}: expected a file in a folder that can be written to, found {path}")

    def message(self) -> Generate:
        """The request as the coordinator gets it."""
        return Generate(
            prompt=self.prompt,
            prompt_ids=list(self.prompt_ids) if self.prompt is None else None,
            add_bos=not self.no_bos,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            seed=self.seed,
            stop=list(self.stop),
            ignore_eos=self.ignore_eos,
            top_logits=self.top_logits,
            dump_logits=self.dump_logits,
            dump_routes=self.dump_routes,
            dump_activations=self.dump_activations,
        )


REQUEST_FLAGS_WITHOUT_PROMPT = tuple(n for n in settings.settings_of(RequestConfig) if not n.startswith("prompt"))
KNOWN = {*settings.settings_of(RunConfig), *settings.settings_of(RequestConfig)}


def _read_prompt(path: str, source: str) -> str:
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{source}: expected a readable file in UTF-8, found: {error}") from None
    if not text:
        raise UsageError(f"{source}: {path} is empty; a prompt needs at least one character")
    return text


def gather(flags: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Found]:
    """Everything that was set, by name, with its source. `config` (flag or EVRUN_CONFIG) names the file. Raises UsageError."""
    path = flags.get("config") or env.get(settings.variable("config"))
    file = settings.read_file(path, KNOWN) if path else {}
    return settings.merge(KNOWN, flags, env, file)


def unknown_variables(env: Mapping[str, str]) -> list[str]:
    """Variables that look like settings and are none."""
    known = {settings.variable(name) for name in {*KNOWN, "config"}}
    return sorted(name for name in env if name.startswith(settings.ENV_PREFIX) and name not in known)


def launch_settings(flags: Mapping[str, Any], env: Mapping[str, str]) -> tuple[RunConfig, RequestConfig | None]:
    """What `evrun launch` was asked for. Raises UsageError."""
    merged = gather(flags, env)
    run = RunConfig.of(merged)
    request = RequestConfig.of(merged)
    if request is None:
        stray = [merged[n][1] for n in REQUEST_FLAGS_WITHOUT_PROMPT if n in merged and merged[n][1].startswith("--")]
        if stray:
            raise UsageError(f"{stray[0]} belongs to a request; give --prompt, --prompt-file or --prompt-ids too")
    elif run.detach:
        raise UsageError("--detach with a prompt: launch with --detach first, then `evrun generate` with the prompt")
    return run, request


def generate_settings(flags: Mapping[str, Any], env: Mapping[str, str]) -> tuple[str, RequestConfig]:
    """(name of the run, request) of `evrun generate`. Raises UsageError."""
    merged = gather(flags, env)
    name, source = merged.get("name", (DEFAULT_NAME, "--name"))
    request = RequestConfig.of(merged)
    if request is None:
        raise UsageError("expected a prompt, found none; give --prompt, --prompt-file or --prompt-ids")
    return check_name(str(name), source), request


def run_name(given: str | None, env: Mapping[str, str]) -> str:
    """The run a command speaks to: --name, else EVRUN_NAME, else `default`. Raises UsageError."""
    if given is not None:
        return check_name(given)
    return check_name(env.get(settings.variable("name"), DEFAULT_NAME), settings.variable("name"))
