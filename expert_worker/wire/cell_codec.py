"""Call, Partial and Failed <-> bytes of a shared cell: fixed structures, since a layer call is made of them.

Every message begins with its kind. A cell belongs to one run and one rank, so the run is not said again.
"""

from __future__ import annotations

import struct
from array import array
from typing import Any

from evrun.expert_worker.wire.codec import CodecError
from evrun.expert_worker.wire.messages import COUNTERS, Call, Failed, Partial

_CALL = struct.Struct("<8q")
_PARTIAL = struct.Struct(f"<6qd{len(COUNTERS)}q")
_FAILED = struct.Struct("<5q")
_KIND = struct.Struct("<q")
_CALL_KIND, _PARTIAL_KIND, _FAILED_KIND = 0x45565231, 0x45565232, 0x45565233
"""Words that no other field of a message is likely to hold."""


def encode(message: Call | Partial | Failed) -> bytes:
    if isinstance(message, Call):
        m = message
        head = _CALL.pack(_CALL_KIND, m.incarnation, m.sequence, m.layer, m.slot, m.tokens, m.checksum, len(m.experts))
        return head + array("i", m.experts).tobytes()
    if isinstance(message, Partial):
        p = message
        return _PARTIAL.pack(_PARTIAL_KIND, p.incarnation, p.sequence, p.layer, p.rows, p.checksum, p.compute_s, *p.counters)
    text = message.cause.encode()
    return _FAILED.pack(_FAILED_KIND, message.incarnation, message.sequence, message.layer, len(text)) + text


def decode(data: bytes, run_id: str) -> Any:
    """The message, as one of `run_id`. Raises CodecError for any other bytes."""
    try:
        (kind,) = _KIND.unpack_from(data)
        if kind == _CALL_KIND:
            _, incarnation, sequence, layer, slot, tokens, checksum, count = _CALL.unpack_from(data)
            experts = array("i", data[_CALL.size :])
            if len(experts) == count:
                return Call(run_id, incarnation, sequence, layer, slot, tokens, experts.tolist(), bool(checksum))
        elif kind == _PARTIAL_KIND and len(data) == _PARTIAL.size:
            _, incarnation, sequence, layer, rows, checksum, compute_s, *counters = _PARTIAL.unpack(data)
            return Partial(run_id, incarnation, sequence, layer, rows, checksum, counters, compute_s)
        elif kind == _FAILED_KIND:
            _, incarnation, sequence, layer, length = _FAILED.unpack_from(data)
            text = data[_FAILED.size :]
            if len(text) == length:
                return Failed(run_id, incarnation, sequence, layer, text.decode())
    except (struct.error, ValueError) as error:
        raise CodecError(f"cell: not a message: {error}") from None
    raise CodecError(f"cell: {len(data)} bytes that are no message of this version")
