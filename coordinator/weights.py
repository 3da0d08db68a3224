"""Checkpoint tensors -> torch tensors of the dense tree, one at a time; and rows of the tables that are never loaded.

Peak memory while loading: what is loaded so far plus one tensor; on a card, that tensor once on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from evrun.expert_worker.wire.checkpoint.payload import check_payload
from evrun.expert_worker.wire.checkpoint.reader import Checkpoint
from evrun.expert_worker.wire.errors import PayloadError

Progress = Callable[[int, str], None]
"""(bytes done since the last call, name of what they are)"""

_TORCH = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.uint8, "F8_E8M0": torch.uint8}
"""Formats of the release stay raw codes: torch's own 8-bit types support few operations."""


class DenseLoader:
    """Loads named tensors to one device; each is checked for values that no header shows."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, progress: Progress) -> None:
        self.checkpoint = checkpoint
        self.device = device
        self._progress = progress

    def load(self, name: str) -> torch.Tensor:
        """The tensor in its own type (uint8 codes for F8_E4M3 and F8_E8M0), in memory of its own.

        Raises PayloadError (shard, tensor, row) for an E8M0 byte 255, a NaN code, an infinity or NaN.
        """
        tensor = self.checkpoint.tensor(name)
        check_payload(tensor)
        # The mapping is read-only, byte-aligned and evictable: the dense tree keeps a copy.
        values = torch.from_numpy(np.array(tensor.data)).view(_TORCH[tensor.dtype]).view(tensor.shape)
        self._progress(tensor.data.nbytes, name)
        return values.to(self.device)

    def table(self, name: str) -> MappedTable:
        """Rows of a tensor that stays where it lies. Costs nothing until rows are gathered."""
        return MappedTable(self.checkpoint, name)

    def mapped_dense(self, name: str) -> MappedTable:
        """The same for a tensor that counts among the dense ones in the progress."""
        table = self.table(name)
        self._progress(table.nbytes, name)
        return table


class MappedTable:
    """A [rows, columns] tensor of the checkpoint, gathered by row from the page cache of its shard."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._tensor = checkpoint.tensor(name)

    @property
    def rows(self) -> int:
        return self._tensor.shape[0]

    @property
    def nbytes(self) -> int:
        return self._tensor.data.nbytes

    def gather(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """rows [...] below `rows`, none negative -> [..., columns] on the host, in the type that `DenseLoader.load` gives.

        Raises PayloadError (shard, tensor, row) for a value that no header shows.
        """
        data = self._tensor.data[rows]
        bad = self._bad(data)
        if bad.any():
            row = int(rows[bad.any(-1)].flat[0])
            where = f"{self._tensor.shard}: {self._tensor.name}, row {row}"
            what = f"NaN or infinity in {self._tensor.dtype}"
            raise PayloadError(f"{where}: {what}; the file is damaged or was written wrongly: copy it again")
        return torch.from_numpy(data).view(_TORCH[self._tensor.dtype])

    def _bad(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        masks: dict[str, Callable[[], npt.NDArray[np.bool_]]] = {
            "F8_E4M3": lambda: (data & 0x7F) == 0x7F,
            "F8_E8M0": lambda: data == 255,
            "BF16": lambda: (data.view("<u2") & 0x7F80) == 0x7F80,
        }
        return masks[self._tensor.dtype]()
