"""One setting of a command: how it is written, what it may be, and where a value came from.

A setting is a field of a frozen dataclass (`launch.config`); its name gives the flag `--max-context`, the variable
`EVRUN_MAX_CONTEXT` and the key `max-context` of the config file. `merge` picks flag > environment > file; `parse`
turns what was written into the field's type once, and a bad value names its source, the value and what is expected.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evrun.expert_worker.wire.errors import UsageError

ENV_PREFIX = "EVRUN_"
SWITCH_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
Found = tuple[Any, str]
"""A value as it was written, and its source for messages: `--world`, `EVRUN_WORLD`, `run.toml: world`."""


class NotThisError(ValueError):
    """A value does not fit its kind; the message is what was expected."""


@dataclass(frozen=True)
class Kind:
    """What a value may be. `parse` takes text (flag, environment) or a value of TOML; raises NotThisError."""

    metavar: str = "TEXT"

    def parse(self, value: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Integer(Kind):
    metavar: str = "N"
    minimum: int = 0
    maximum: int = 2**63 - 1

    def parse(self, value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,19}\s*", value):
            value = int(value)
        if type(value) is not int or not self.minimum <= value <= self.maximum:
            upper = "" if self.maximum == 2**63 - 1 else f" and <= {self.maximum}"
            raise NotThisError(f"an integer >= {self.minimum}{upper}")
        return value


_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Size(Kind):
    """Bytes: a number, or one with K, M, G or T (powers of 1024)."""

    metavar: str = "SIZE"

    def parse(self, value: Any) -> int:
        match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,3})?)([KMGT]?)(?:iB|B)?", str(value).strip(), re.ASCII)
        if match is None or isinstance(value, bool):
            raise NotThisError("bytes, as in 4096, 512M or 20G")
        return int(float(match[1]) * _SIZE_UNITS[match[2]])


@dataclass(frozen=True)
class Number(Kind):
    """A finite float."""

    metavar: str = "X"
    minimum: float = 0.0
    above: bool = False
    """Whether the minimum itself is too small."""

    def parse(self, value: Any) -> float:
        expected = f"a finite number {'>' if self.above else '>='} {self.minimum:g}"
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise NotThisError(expected)
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise NotThisError(expected) from None
        if not math.isfinite(number) or number < self.minimum or (self.above and number == self.minimum):
            raise NotThisError(expected)
        return number


@dataclass(frozen=True)
class Choice(Kind):
    options: tuple[str, ...] = ()

    def parse(self, value: Any) -> str:
        if value not in self.options:
            raise NotThisError("one of " + ", ".join(self.options))
        return str(value)


@dataclass(frozen=True)
class Text(Kind):
    """Text that is not empty and can be written as UTF-8 (an argument that is not shows up as lone surrogates)."""

    def parse(self, value: Any) -> str:
        if not isinstance(value, str) or not value or not _is_utf8(value):
            raise NotThisError("text in UTF-8, not empty")
        return value


@dataclass(frozen=True)
class Texts(Kind):
    """A flag that may be repeated; one text in the environment; a text or a list of texts in TOML."""

    def parse(self, value: Any) -> tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            raise NotThisError("text, or a list of texts")
        return tuple(Text().parse(item) for item in items)


@dataclass(frozen=True)
class Pattern(Kind):
    regex: str = ""

    def parse(self, value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(self.regex, value, re.ASCII):
            raise NotThisError(f"text that matches {self.regex}")
        return value


@dataclass(frozen=True)
class Switch(Kind):
    metavar: str = ""

    def parse(self, value: Any) -> bool:
        if isinstance(value, str):
            value = SWITCH_WORDS.get(value.lower())
        if not isinstance(value, bool):
            raise NotThisError("true or false")
        return value


@dataclass(frozen=True)
class Integers(Kind):
    """`0,3,17`, or a list in TOML; not empty."""

    metavar: str = "N,N,..."

    def parse(self, value: Any) -> tuple[int, ...]:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or not items:
            raise NotThisError("integers >= 0 with commas between them")
        try:
            return tuple(Integer().parse(item) for item in items)
        except NotThisError:
            raise NotThisError("integers >= 0 with commas between them") from None


@dataclass(frozen=True)
class Devices(Kind):
    """`cuda:0,cuda:1,cpu`, or a list in TOML: one device a rank."""

    metavar: str = "DEV,DEV,..."

    def parse(self, value: Any) -> tuple[str, ...]:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or not items:
            raise NotThisError("devices with commas between them, as in cuda:0,cuda:1,cpu")
        for item in items:
            if not isinstance(item, str) or not re.fullmatch(r"cpu|cuda:[0-9]{1,3}", item):
                raise NotThisError("devices with commas between them, each `cpu` or `cuda:K`, as in cuda:0,cuda:1,cpu")
        return tuple(items)


@dataclass(frozen=True)
class FilePath(Kind):
    """A path, made absolute; relative ones start at the current folder."""

    metavar: str = "FILE"

    def parse(self, value: Any) -> str:
        if not isinstance(value, str) or not value or "\0" in value or not _is_utf8(value):
            raise NotThisError("a path in UTF-8")
        return str(Path(os.path.expanduser(value)).absolute())


@dataclass(frozen=True)
class CheckpointPath(FilePath):
    """A folder; the bare word `demo` is the built-in checkpoint."""

    metavar: str = "DIR"

    def parse(self, value: Any) -> str:
        return "demo" if value == "demo" else super().parse(value)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class Setting:
    """What a config field says of itself beside its default."""

    kind: Kind
    help: str
    hidden: bool = False


def setting(default: Any, kind: Kind, help: str, hidden: bool = False) -> Any:  # noqa: A002
    """A dataclass field that is a setting."""
    return dataclasses.field(default=default, metadata={"setting": Setting(kind, help, hidden)})


def settings_of(cls: type[Any]) -> dict[str, tuple[Setting, Any]]:
    """Field name -> (its Setting, its default), in the order of the dataclass."""
    return {f.name: (f.metadata["setting"], f.default) for f in dataclasses.fields(cls) if "setting" in f.metadata}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def read_file(path: str, known: set[str]) -> dict[str, Found]:
    """Values of a TOML config file by field name; keys are written `max-context` or `max_context`.

    Raises UsageError: unreadable, not TOML, a key that is no setting, a key twice in both spellings.
    """
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--config {path}: expected a readable TOML file, found: {error}") from None
    found: dict[str, Found] = {}
    for key, value in raw.items():
        name = key.replace("-", "_")
        if name not in known:
            raise UsageError(f"{path}: {key!r} is no setting; known: {', '.join(sorted(n.replace('_', '-') for n in known))}")
        if name in found:
            raise UsageError(f"{path}: {key!r} is there twice, spelled with - and with _; keep one")
        found[name] = (value, f"{path}: {key}")
    return found


def merge(names: set[str], flags: Mapping[str, Any], env: Mapping[str, str], file: Mapping[str, Found]) -> dict[str, Found]:
    """The value that holds for each name that was set anywhere: flag, else environment, else file.

    flags  name -> value as click gives it; None, False and () mean that the flag was not given
    """
    merged: dict[str, Found] = {}
    for name in names:
        given = flags.get(name)
        if given is not None and given is not False and given != ():
            merged[name] = (given, flag(name))
        elif variable(name) in env:
            merged[name] = (env[variable(name)], variable(name))
        elif name in file:
            merged[name] = file[name]
    return merged


def parse(cls: type[Any], merged: Mapping[str, Found]) -> dict[str, Any]:
    """Keyword arguments for the dataclass: parsed values where something was set. Raises UsageError."""
    values = {}
    for name, (declared, _) in settings_of(cls).items():
        if name in merged:
            written, source = merged[name]
            try:
                values[name] = declared.kind.parse(written)
            except NotThisError as error:
                shown = repr(written) if len(repr(written)) <= 80 else repr(written)[:77] + "..."
                raise UsageError(f"{source}: expected {error}, found {shown}") from None
    return values
