"""The dtypes of a safetensors header, as this project reads them: bytes per element, nothing else.

An own table, so that no installed reader has to know F8_E8M0 or F8_E4M3.
"""

from __future__ import annotations

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
"""Header dtype string -> bytes per element. Packed E2M1 experts are I8 in the header: two codes per byte."""
