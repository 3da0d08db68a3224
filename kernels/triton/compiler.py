"""`python -m evrun.kernels.triton.compiler FOLDER`: the only process that runs Triton's compiler.

stdin: JSON, a list of {kernel, constants, warps, stages, architecture (90 for capability 9.0)}. FOLDER/0, FOLDER/1, ...
become a line of JSON (name, shared_bytes, parameters, unused) and the machine code of each. Stops at the first that fails.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from evrun.kernels.triton import params, sources
from evrun.kernels.triton.params import POINTER, Call


def compile_unit(unit: Mapping[str, Any]) -> Any:
    """Triton's compiled kernel; `asm` has every stage."""
    function = getattr(sources, unit["kernel"])
    constants = dict(unit["constants"])
    types = {name: "i64" if kind is POINTER else "i32" for name, kind, *_ in Call._fields_}
    signature = {name: "constexpr" if name in constants else types[name] for name in function.arg_names}
    on_16 = [i for i, name in enumerate(function.arg_names) if signature[name] == "i64" and name not in params.NOT_ON_16]
    aligned = {(i,): [["tt.divisibility", 16]] for i in on_16}
    source = ASTSource(function, signature, {(function.arg_names.index(name),): value for name, value in constants.items()}, aligned)
    options = {"num_warps": unit["warps"], "num_stages": unit["stages"], "enable_fp_fusion": True}
    return triton.compile(source, GPUTarget("cuda", unit["architecture"], 32), options)


def main(folder: str) -> None:
    for number, unit in enumerate(json.load(sys.stdin)):
        kernel = compile_unit(unit)
        parameters = [name for name in getattr(sources, unit["kernel"]).arg_names if name.islower()]
        entry = re.search(r"\.entry \w+\((.*?)\)", kernel.asm["ptx"], re.DOTALL)
        assert entry, "PTX has an entry"
        head = {
            "name": kernel.metadata.name,
            "shared_bytes": kernel.metadata.shared,
            "parameters": parameters,
            "unused": entry[1].count(".param") - len(parameters),
        }
        (Path(folder) / str(number)).write_bytes(json.dumps(head).encode() + b"\n" + kernel.asm["cubin"])


if __name__ == "__main__":
    main(sys.argv[1])
