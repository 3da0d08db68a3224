"""Message <-> bytes: a msgpack array [version, kind, field, field, ...]; never pickle.

A message is a frozen dataclass registered under a kind. Fields are what msgpack carries (int, float, str, bytes, bool,
None, lists and dicts of these); lists stay lists. Everything a peer can get wrong is one CodecError.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import msgpack

VERSION = 1
MAX_BYTES = 8 << 20
"""No message is longer; payloads travel through the slots, never in a message."""


class CodecError(ValueError):
    """Bytes that are not a message of this protocol version."""


T = TypeVar("T")


class Codec:
    """The messages of one protocol. Registering two classes under one kind is an error of ours."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._by_kind: dict[str, type[Any]] = {}

    def register(self, cls: type[T]) -> type[T]:
        assert dataclasses.is_dataclass(cls)
        assert cls.__name__ not in self._by_kind
        self._by_kind[cls.__name__] = cls
        return cls

    def encode(self, message: Any) -> bytes:
        """Raises CodecError when the message is too long."""
        fields = [getattr(message, f.name) for f in dataclasses.fields(message)]
        data: bytes = msgpack.packb([VERSION, type(message).__name__, *fields], use_bin_type=True)
        if len(data) > MAX_BYTES:
            raise CodecError(f"{self.name}: message {type(message).__name__} is {len(data)} bytes, at most {MAX_BYTES}")
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
        cls = self._by_kind.get(kind) if isinstance(kind, str) else None
        if cls is None:
            raise CodecError(f"{self.name}: unknown message {kind!r}; known: {', '.join(sorted(self._by_kind))}")
        declared = dataclasses.fields(cls)
        if len(fields) != len(declared):
            raise CodecError(f"{self.name}: {kind} has {len(declared)} fields, found {len(fields)}")
        for f, value in zip(declared, fields, strict=True):
            if not _fits(str(f.type), value):
                raise CodecError(f"{self.name}: {kind}.{f.name} must be {f.type}, found {type(value).__name__}")
        return cls(*fields)


_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bytes": (bytes,),
    "bool": (bool,),
    "None": (type(None),),
}


def _fits(annotation: str, value: Any) -> bool:
    """Whether a decoded value has the annotated type: names of _PLAIN, `A | B`, `list[X]`, `dict[K, V]`."""
    if "[" not in annotation:
        return any(_is_plain(part.strip(), value) for part in annotation.split("|"))
    for part in _split_union(annotation):
        head, _, inner = part.partition("[")
        if not inner:
            if _is_plain(head, value):
                return True
        elif head == "list" and isinstance(value, list):
            if all(_fits(inner[:-1], item) for item in value):
                return True
        elif head == "dict" and isinstance(value, dict):
            key, _, item = inner[:-1].partition(",")
            if all(_fits(key.strip(), k) and _fits(item.strip(), v) for k, v in value.items()):
                return True
    return False


def _is_plain(name: str, value: Any) -> bool:
    kinds = _PLAIN.get(name, ())
    return isinstance(value, kinds) and (name == "bool" or not isinstance(value, bool))


def _split_union(annotation: str) -> list[str]:
    """`A | list[B | C]` -> [`A`, `list[B | C]`]."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(annotation):
        depth += (c == "[") - (c == "]")
        if c == "|" and depth == 0:
            parts.append(annotation[start:i].strip())
            start = i + 1
    return [*parts, annotation[start:].strip()]
