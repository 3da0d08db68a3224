"""Trained parameters -> a checkpoint in the release's format, through the exporter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from evrun.demo.parameters import Parameters, expert_weight
from evrun.demo.quantise import Packed, pack_fp4, pack_fp8_rows, pack_fp8_tiles
from evrun.expert_worker.wire.checkpoint.config import ModelConfig
from evrun.expert_worker.wire.checkpoint.header import Spec
from evrun.kernels.formats import float32_to_bfloat16_bits
from evrun.launch.export.checkpoint import write_checkpoint


class TrainedWeights:
    """launch.export.writer.Payload of trained parameters; packs a weight when one of its two tensors is asked for."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._experts: dict[str, Packed] = {}
        for name in parameters:
            if ".ffn.experts." in name:
                self._experts[name] = pack_fp4(parameters[name])

    def __call__(self, name: str, spec: Spec) -> Iterator[npt.NDArray[Any]]:
        yield np.ascontiguousarray(self._bytes(name, spec))

    def _bytes(self, name: str, spec: Spec) -> npt.NDArray[Any]:
        stem, kind = name.rsplit(".", 1)
        if ".ffn.experts." in name:
            _, layer, _, _, expert, part = stem.split(".")
            packed = self._experts[expert_weight(int(layer), part)]
            values: npt.NDArray[Any] = (packed.scales if kind == "scale" else packed.codes)[int(expert)]
            return values
        if kind == "scale" or spec[0] == "F8_E4M3":
            weight = self._parameters[f"{stem}.weight"]
            packed = pack_fp8_rows(weight) if stem.endswith(".engram.embed") else pack_fp8_tiles(weight)
            return packed.scales if kind == "scale" else packed.codes
        plain = self._parameters[name].detach().float().cpu().numpy()
        return float32_to_bfloat16_bits(plain) if spec[0] == "BF16" else plain


def export(parameters: Parameters, config: ModelConfig, tokenizer: Tokenizer, directory: Path, force: bool = False) -> int:
    """Write the checkpoint; returns the bytes of its tensors. Raises what `write_checkpoint` raises."""
    return write_checkpoint(config, directory, payload=TrainedWeights(parameters), built=tokenizer, force=force)
