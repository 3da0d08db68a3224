"""The native sources under the address, undefined-behaviour and thread sanitizers, through their C interface."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from evrun.kernels import native

CSRC = Path(__file__).parents[2] / "kernels" / "native" / "csrc"
MAIN = Path(__file__).parent / "native_sanitize" / "main.cpp"
FLAGS = ["-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-ffp-contract=off", "-pthread", f"-I{CSRC}"]
ISA_FLAGS = {
    "avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "avx512.cpp": ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vbmi", "-mavx512vnni"],
}


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_clean_under(sanitizers: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    assert compiler, "g++ is needed for this test"
    flags = [*FLAGS, f"-fsanitize={sanitizers}"]
    objects = []
    for source in [*sorted(CSRC.glob("*.cpp")), MAIN]:
        objects.append(tmp_path / f"{source.stem}.o")
        subprocess.run([compiler, *flags, *ISA_FLAGS.get(source.name, []), "-c", source, "-o", objects[-1]], check=True, timeout=240)
    program = tmp_path / "native_sanitize"
    subprocess.run([compiler, *flags, *objects, "-o", program], check=True, timeout=120)
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 wrong" in done.stdout
    for variant in native.variants():
        assert f"{variant.name}: {'run' if variant.supported else 'not supported here'}" in done.stdout
