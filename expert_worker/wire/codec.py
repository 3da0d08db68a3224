"""Message <-> bytes: a msgpack array [version, kind, field, field, ...]; never pickle.

A message is a frozen dataclass registered under a kind. Fields are what msgpack carries (int, float, str, bytes, bool,
None, lists and dicts of these); lists stay lists. Everything a peer can get wrong is one CodecError.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack

VERSION = 1
MAX_BYTES = 8 << 20
"""No message is longer; payloads travel through the slots, never in a message."""


class CodecError(ValueError):
    """Bytes that are not a message of this protocol version."""


T = TypeVar("T")
Check = Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class _Shape:
    """A registered message, with what a layer call should not work out again each time."""

    cls: type[Any]
    names: tuple[str, ...]
    types: tuple[str, ...]
    checks: tuple[Check, ...]


class Codec:
    """The messages of one protocol. Registering two classes under one kind is an error of ours."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._by_kind: dict[str, _Shape] = {}

    def register(self, cls: type[T]) -> type[T]:
        assert dataclasses.is_dataclass(cls)
        assert cls.__name__ not in self._by_kind
        fields = dataclasses.fields(cls)
        types = tuple(str(f.type) for f in fields)
        self._by_kind[cls.__name__] = _Shape(cls, tuple(f.name for f in fields), types, tuple(map(_check_of, types)))
        return cls

    def encode(self, message: Any) -> bytes:
        """Raises CodecError when the message is too long."""
        kind = type(message).__name__
        fields = [getattr(message, name) for name in self._by_kind[kind].names]
        data: bytes = msgpack.packb([VERSION, kind, *fields], use_bin_type=True)
        if len(data) > MAX_BYTES:
            raise CodecError(f"{self.name}: message {kind} is {len(data)} bytes, at most {MAX_BYTES}")
        return data

    def decode(self, data: bytes | memoryview) -> Any:
        """Raises CodecError (what, expected, found); never anything else, whatever the bytes."""
        if len(data) > MAX_BYTES:
            raise CodecError(f"{self.name}: message of {len(data)} bytes, at most {MAX_BYTES}")
        try:
            raw = msgpack.unpackb(data, raw=False, strict_map_key=False)
        except Exception as error:
            raise CodecError(f"{self.name}: not msgpack ({type(error).__name__})") from error
        if not isinstance(raw, list) or len(raw) < 2:
            raise CodecError(f"{self.name}: expected [version, kind, ...], found {type(raw).__name__}")
        version, kind, fields = raw[0], raw[1], raw[2:]
        if version != VERSION:
            raise CodecError(f"{self.name}: protocol version {VERSION} expected, found {version!r}")
        shape = self._by_kind.get(kind) if isinstance(kind, str) else None
        if shape is None:
            raise CodecError(f"{self.name}: unknown message {kind!r}; known: {', '.join(sorted(self._by_kind))}")
        if len(fields) != len(shape.names):
            raise CodecError(f"{self.name}: {kind} has {len(shape.names)} fields, found {len(fields)}")
        for check, value, name, expected in zip(shape.checks, fields, shape.names, shape.types, strict=True):
            if not check(value):
                raise CodecError(f"{self.name}: {kind}.{name} must be {expected}, found {type(value).__name__}")
        return shape.cls(*fields)


_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bytes": (bytes,),
    "bool": (bool,),
    "None": (type(None),),
}


def _check_of(annotation: str) -> Check:
    """Whether a decoded value has the annotated type: names of _PLAIN, `A | B`, `list[X]`, `dict[K, V]`."""
    checks = [_check_of_one(part) for part in _split(annotation, "|")]
    return checks[0] if len(checks) == 1 else lambda value: any(check(value) for check in checks)


def _check_of_one(annotation: str) -> Check:
    head, _, inner = annotation.partition("[")
    if head == "list":
        item = _check_of(inner[:-1])
        return lambda value: isinstance(value, list) and all(map(item, value))
    if head == "dict":
        key, entry = map(_check_of, _split(inner[:-1], ","))
        return lambda value: isinstance(value, dict) and all(map(key, value)) and all(map(entry, value.values()))
    kinds, may_be_bool = _PLAIN[head], head == "bool"
    return lambda value: isinstance(value, kinds) and (may_be_bool or not isinstance(value, bool))


def _split(annotation: str, at: str) -> list[str]:
    """Split where no bracket is open: `A | list[B | C]` at `|` -> [`A`, `list[B | C]`]."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(annotation):
        depth += (c == "[") - (c == "]")
        if c == at and depth == 0:
            parts.append(annotation[start:i].strip())
            start = i + 1
    return [*parts, annotation[start:].strip()]
