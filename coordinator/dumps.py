"""The three dumps of a request: logits, routes, activations, as safetensors without metadata.

One row per token that was fed: prompt and generated tokens but the last. Held in memory until the request ends.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save

from evrun.expert_worker.wire.errors import RunError
from evrun.expert_worker.wire.requests import Generate


class Dumps:
    """Collects rows while the model runs (it is the model's observer), writes the files at the end."""

    def __init__(self, request: Generate) -> None:
        self._paths = {"logits": request.dump_logits, "routes": request.dump_routes, "activations": request.dump_activations}
        self._rows: dict[str, dict[str, list[torch.Tensor]]] = {kind: {} for kind, path in self._paths.items() if path}
        self.wants_all_logits = request.dump_logits is not None

    @property
    def observes(self) -> bool:
        """Whether the model must report routes or activations."""
        return "routes" in self._rows or "activations" in self._rows

    def logits(self, logits: torch.Tensor) -> None:
        """logits [T, V] fp32 of the tokens just fed."""
        self._add("logits", "logits", logits)

    def route(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """ids [T, K], best score first; weights [T, K] fp32."""
        for kind in ("routes", "activations"):  # activations stand beside their routes, so that a kernel can be replayed
            self._add(kind, f"layers.{layer}.expert_ids", ids.to(torch.int32))
            self._add(kind, f"layers.{layer}.expert_weights", weights)

    def moe(self, layer: int, moe_in: torch.Tensor, routed_out: torch.Tensor) -> None:
        """moe_in [T, H], routed_out [T, H] fp32 (shared expert not included)."""
        self._add("activations", f"layers.{layer}.moe_in", moe_in.to(torch.float32))
        self._add("activations", f"layers.{layer}.moe_routed_out", routed_out)

    def _add(self, kind: str, name: str, rows: torch.Tensor) -> None:
        if kind in self._rows:
            self._rows[kind].setdefault(name, []).append(rows.detach().to("cpu", copy=True))

    def write(self) -> None:
        """Write every file that was asked for, whole or not at all. Raises RunError."""
        for kind, named in self._rows.items():
            path = Path(str(self._paths[kind]))
            data = save({name: torch.cat(rows) for name, rows in sorted(named.items())})
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                temporary.write_bytes(data)
                temporary.replace(path)
            except OSError as error:
                temporary.unlink(missing_ok=True)
                raise RunError(f"--dump-{kind} {path}: {error.strerror or error}; nothing was written") from error
