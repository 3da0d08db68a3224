"""Which layer plays which part, derived from the number of layers in the release's own proportions (spec 1.3). Pure."""

from __future__ import annotations

from dataclasses import dataclass

RELEASE_LAYERS = 40
_SOURCE_STEP = 6
"""Layers from one KV source to the next among the ratio-2 layers of the release."""
_INDEX_STEP = 4
"""Layers from one index source to the next among its ratio-1 layers."""


@dataclass(frozen=True)
class Schedule:
    """Layer roles; the fields are those of ModelConfig."""

    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int
    engram_layer_ids: tuple[int, ...]


def derive(num_layers: int) -> Schedule:
    """Window-only layers first, ratio 2 up to the middle, ratio 1 from there; with 40 layers exactly the release's."""
    window_only = 1 if num_layers < 6 else 2
    middle = max(window_only + 1, num_layers // 2)
    ratios = tuple(0 if i < window_only else 2 if i < middle else 1 for i in range(num_layers))
    encoder = range(window_only, min(middle, num_layers), _scaled(_SOURCE_STEP, num_layers))
    decoder = range(middle, num_layers, _scaled(_INDEX_STEP, num_layers))
    return Schedule(
        compress_ratios=ratios,
        kv_source_layer_ids=(*encoder, *decoder[:1]),
        index_source_layer_ids=(*encoder, *decoder),
        candidate_source_layer_id=decoder[0] if len(decoder) > 1 else -1,
        engram_layer_ids=tuple(sorted({min(1, num_layers - 1), *encoder[-1:]})),
    )


def sources(ratios: tuple[int, ...]) -> Schedule:
    """Roles for given ratios: every run of equal ratios >= 1 gets one KV source, at its start. No Engram, no candidates."""
    starts = tuple(i for i, ratio in enumerate(ratios) if ratio and (i == 0 or ratios[i - 1] != ratio))
    return Schedule(ratios, starts, starts, -1, ())


def _scaled(step: int, num_layers: int) -> int:
    return max(2, step * num_layers // RELEASE_LAYERS)
