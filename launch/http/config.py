"""What `evrun serve` adds to a launch, checked once: where to listen, who may ask, how many may wait."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evrun.expert_worker.wire.errors import UsageError
from evrun.launch import config, settings
from evrun.launch.config import RequestConfig, RunConfig
from evrun.launch.settings import FilePath, Found, Integer, Pattern, Switch, setting

KEY_VARIABLE = "EVRUN_API_KEY"
MAX_KEY_CHARACTERS = 4096
MODEL_NAME = "deepseek-v4.1-flash"
LIBRARIES = {"starlette": "starlette", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client", "deepseek_recipe": "deepseek-recipe"}
"""Module -> package of the extra `serve`."""


@dataclass(frozen=True)
class ServeConfig:
    """The front end, as asked for. After `of`, `key_sha256` is set where a key holds."""

    host: str = setting("127.0.0.1", Pattern("ADDRESS", r"[A-Za-z0-9._:-]{1,253}"), "Address to listen at.")
    port: int = setting(8000, Integer(maximum=65535), "Port to listen at; 0: any that is free.")
    api_key_file: str | None = setting(None, FilePath(), f"File with the key that clients must send. Default: {KEY_VARIABLE}, else none.")
    allow_unauthenticated: bool = setting(False, Switch(), "Listen beyond this machine without a key.")
    served_model_name: str = setting(MODEL_NAME, Pattern("NAME", r"[A-Za-z0-9._:/-]{1,128}"), "The model's name for clients.")
    max_queue: int = setting(16, Integer(maximum=10_000), "Requests that may wait; one more gets 429.")
    key_sha256: str = ""
    """Hex; empty: no key is asked for. The key itself is kept nowhere."""

    @classmethod
    def of(cls, merged: Mapping[str, Found], env: Mapping[str, str]) -> ServeConfig:
        """Raises UsageError: a bad value, a key that cannot be used, an open address without a key."""
        found = cls(**settings.parse(cls, merged))
        key, source = _key(found.api_key_file, env)
        if not is_loopback(found.host) and not key and not found.allow_unauthenticated:
            raise UsageError(
                f"--host {found.host}: others could reach it and no key is set; give --api-key-file or {KEY_VARIABLE}, "
                "or --allow-unauthenticated"
            )
        if key is not None and (not key.isascii() or not key.isprintable() or not 1 <= len(key) <= MAX_KEY_CHARACTERS or " " in key):
            raise UsageError(f"{source}: expected a key of 1 to {MAX_KEY_CHARACTERS} printable ASCII characters without spaces")
        return dataclasses.replace(found, key_sha256=hashlib.sha256(key.encode()).hexdigest() if key else "")


def serve_settings(flags: Mapping[str, Any], env: Mapping[str, str]) -> tuple[RunConfig, ServeConfig]:
    """What `evrun serve` was asked for. Raises UsageError."""
    known = {*config.KNOWN, *settings.settings_of(ServeConfig)}
    path = flags.get("config") or env.get(settings.variable("config"))
    merged = settings.merge(known, flags, env, settings.read_file(path, known) if path else {})
    for name in settings.settings_of(RequestConfig):
        if name in merged:
            raise UsageError(f"{merged[name][1]} belongs to a request; `evrun serve` takes requests over HTTP")
    return RunConfig.of(merged), ServeConfig.of(merged, env)


def unknown_variables(env: Mapping[str, str]) -> list[str]:
    """Variables that look like settings and are none of `evrun serve`."""
    ours = {settings.variable(name) for name in settings.settings_of(ServeConfig)} | {KEY_VARIABLE}
    return [name for name in config.unknown_variables(env) if name not in ours]


def check_libraries() -> None:
    """Raises UsageError that names the extra when a library of the front end is not installed."""
    missing = [package for module, package in LIBRARIES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UsageError(f"evrun serve needs the extra `serve` ({', '.join(missing)} missing); run `pip install 'evrun[serve]'`")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _key(path: str | None, env: Mapping[str, str]) -> tuple[str | None, str]:
    """(the key, where it came from). Raises UsageError for a file that cannot be read."""
    if path is None:
        return env.get(KEY_VARIABLE), KEY_VARIABLE
    source = f"--api-key-file {path}"
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(MAX_KEY_CHARACTERS + 2).strip(), source
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{source}: expected a readable text file, found: {error}") from None
