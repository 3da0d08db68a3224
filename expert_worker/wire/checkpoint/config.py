"""The geometry of a DeepSeek-V4.1-Flash checkpoint: one schema for both config layouts of the release.

Fields carry the names of `text_config` in the nested `config.json` (spec section 1.2). `inference/config.json` is the
flat layout with other names for the same values; `parse` reads either.

When both files are there, every value that both state must agree, else the checkpoint is refused with key and both
values; the nested file, which states more, is then the one that counts.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from evrun.expert_worker.wire.checkpoint import layouts
from evrun.expert_worker.wire.errors import CheckpointError


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the layers with compress ratio >= 1 (spec 3.4)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """Every value of the config that inference needs. Sizes are counts, ids are layer numbers."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    """One ratio per backbone layer (draft layers' entries are cut off): 0 window only, 1 or 2."""
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    """-1: no candidate pool."""
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    bos_token_id: int
    eos_token_id: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one routed expert of one layer as stored: codes and scales of w1, w3 and w2."""
        elements = 3 * self.hidden_size * self.moe_intermediate_size
        return elements // 2 + elements // 32

    def kv_source(self, layer: int) -> int:
        """The layer whose compressor, compressed cache and index keys `layer` reads (spec 1.3). Ratio >= 1 layers only."""
        return max(s for s in self.kv_source_layer_ids if s <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose indexer chose the entries that `layer` attends to (spec 1.3). Ratio >= 1 layers only."""
        return max(s for s in self.index_source_layer_ids if s <= layer)


MAX_EXPERTS = 1 << 16
MAX_NGRAM_SIZE = 64
MAX_NGRAM_HEADS = 4096
"""Far above any geometry: a damaged config must not make the checks themselves run away."""
CONFIG_FILES = ("config.json", "inference/config.json")


def load_config(directory: str | Path) -> ModelConfig:
    """The config of a checkpoint. Raises CheckpointError with every problem of every config file."""
    directory = Path(directory)
    found: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for name in CONFIG_FILES:
        path = directory / name
        try:
            raw = json.loads(path.read_bytes())
        except FileNotFoundError:
            if path.is_symlink():
                problems.append(f"{path}: the link's target {path.readlink()} is missing; copy the file again")
            continue
        except OSError as error:
            problems.append(f"{path}: cannot be read ({error.strerror})")
            continue
        except (ValueError, RecursionError) as error:
            problems.append(f"{path}: not JSON ({type(error).__name__}: {str(error)[:80]})")
            continue
        if not isinstance(raw, dict):
            problems.append(f"{path}: expected a JSON object, found {type(raw).__name__}")
            continue
        values, wrong = layouts.read(raw)
        problems += [f"{path}: {line}" for line in wrong]
        found[name] = _cut_ratios(values)
    if not found and not problems:
        problems.append(f"{directory}: neither {' nor '.join(CONFIG_FILES)} is there: not a checkpoint directory")
    problems += _disagreements(found)
    if problems:
        raise CheckpointError(str(directory), problems)
    values = max(found.values(), key=len)
    where = directory / next(name for name, v in found.items() if v is values)
    if not set(layouts.TOKEN_KEYS) <= set(values):
        values = _special_tokens(directory) | values
    config, problems = build(values)
    if config is None:
        raise CheckpointError(str(directory), [f"{where}: {line}" for line in problems])
    return config


def parse(raw: Mapping[str, Any], where: str = "config") -> ModelConfig:
    """ModelConfig of one parsed config object of either layout. Raises CheckpointError with every problem."""
    values, problems = layouts.read(raw)
    config = None
    if not problems:
        config, problems = build(_cut_ratios(values))
    if config is None:
        raise CheckpointError(where, [f"{where}: {line}" for line in problems])
    return config


def build(values: Mapping[str, Any]) -> tuple[ModelConfig | None, list[str]]:
    """ModelConfig from values by the nested layout's names, or None and every problem."""
    rope, problems = _typed(RopeScaling, {k.removeprefix("rope_scaling."): v for k, v in values.items() if "." in k}, "rope_scaling.")
    plain, more = _typed(ModelConfig, {k: v for k, v in values.items() if "." not in k}, "")
    problems += more
    if problems:
        return None, problems
    config = ModelConfig(rope_scaling=RopeScaling(**rope), **plain)
    problems = validate(config)
    return (None, problems) if problems else (config, [])


def _typed(cls: type[Any], values: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], list[str]]:
    """Values converted to the field types of `cls`, and what does not fit."""
    hints = get_type_hints(cls)
    out: dict[str, Any] = {}
    problems = []
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if kind is RopeScaling:
            continue
        value = values.get(field.name)
        if kind is int and type(value) is int:
            out[field.name] = value
        elif kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            out[field.name] = float(value)
        elif kind == tuple[int, ...] and isinstance(value, (list, tuple)) and all(type(v) is int for v in value):
            out[field.name] = tuple(value)
        else:
            name = {int: "an integer", float: "a number"}.get(kind, "a list of integers")
            problems.append(f"{prefix}{field.name}: expected {name}, found {value!r:.80}")
    return out, problems


def validate(c: ModelConfig) -> list[str]:
    """What makes a geometry impossible or unknown to the format, one line each; empty when it can be served."""
    problems: list[str] = []

    def check(holds: bool, name: str, expected: str, found: object) -> None:
        if not holds:
            problems.append(f"{name}: expected {expected}, found {found!r:.80}")

    positive = (
        "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank "
        "o_lora_rank o_groups swiglu_limit rms_norm_eps max_position_embeddings rope_theta compress_rope_theta n_routed_experts "
        "num_experts_per_tok routed_scaling_factor sliding_window hc_mult hc_sinkhorn_iters hc_eps"
    )
    for name in positive.split():
        value = getattr(c, name)
        check(0 < value < float("inf"), name, "a positive number", value)
    for name in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
        value = getattr(c.rope_scaling, name)
        check(0 < value < float("inf"), f"rope_scaling.{name}", "a positive number", value)
    if problems:
        return problems

    for name in ("hidden_size", "moe_intermediate_size", "head_dim", "q_lora_rank"):
        check(getattr(c, name) % 32 == 0, name, "a multiple of 32 (fp8 and fp4 blocks)", getattr(c, name))
    check(c.o_groups * c.o_lora_rank % 32 == 0, "o_groups * o_lora_rank", "a multiple of 32 (fp8 blocks)", c.o_groups * c.o_lora_rank)
    check(c.num_attention_heads % c.o_groups == 0, "num_attention_heads", f"a multiple of o_groups {c.o_groups}", c.num_attention_heads)
    rope = c.qk_rope_head_dim
    check(rope % 2 == 0 and rope <= c.head_dim, "qk_rope_head_dim", f"even, at most head_dim {c.head_dim}", rope)
    check(c.num_experts_per_tok <= c.n_routed_experts, "num_experts_per_tok", f"at most {c.n_routed_experts}", c.num_experts_per_tok)
    check(c.n_routed_experts <= MAX_EXPERTS, "n_routed_experts", f"at most {MAX_EXPERTS}", c.n_routed_experts)
    check(c.n_shared_experts == 1, "n_shared_experts", "1", c.n_shared_experts)
    for name in ("bos_token_id", "eos_token_id"):
        check(0 <= getattr(c, name) < c.vocab_size, name, f"an id below vocab_size {c.vocab_size}", getattr(c, name))
    problems += _check_schedule(c)
    if c.engram_layer_ids:
        problems += _check_engram(c)
    return problems


def _check_schedule(c: ModelConfig) -> list[str]:
    """Which layer reads whose cache (spec 1.3)."""
    layers = c.num_hidden_layers
    ratios = c.compress_ratios
    if len(ratios) != layers:
        return [f"compress_ratios: expected one per layer, {layers}, found {len(ratios)}"]
    strange = sorted({r for r in ratios if r not in (0, 1, 2)})
    if strange:
        return [f"compress_ratios: expected 0, 1 or 2, found {strange!r:.80} (V4 has other ratios)"]
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        ids = getattr(c, name)
        if any(b <= a for a, b in itertools.pairwise(ids)) or not all(0 <= i < layers for i in ids):
            return [f"{name}: expected ascending layer ids below {layers}, found {list(ids)!r:.80}"]
    problems = []
    for i in sorted({*c.kv_source_layer_ids, *c.index_source_layer_ids}):
        if ratios[i] == 0:
            problems.append(f"compress_ratios[{i}]: expected 1 or 2 for a source layer, found 0")
    for i in c.kv_source_layer_ids:
        if i not in c.index_source_layer_ids:
            problems.append(f"index_source_layer_ids: expected to hold KV source {i}, found {list(c.index_source_layer_ids)}")
    for i, ratio in enumerate(ratios):
        if ratio == 0 or problems:
            continue
        if not c.kv_source_layer_ids or c.kv_source_layer_ids[0] > i:
            found = f"{list(c.kv_source_layer_ids)!r:.80}"
            problems.append(f"kv_source_layer_ids: expected a source at or below layer {i} (ratio {ratio}), found {found}")
        elif ratios[c.kv_source(i)] != ratio:
            found = f"{ratio} over {ratios[c.kv_source(i)]}"
            problems.append(f"compress_ratios[{i}]: expected the ratio of its KV source {c.kv_source(i)}, found {found}")
    source = c.candidate_source_layer_id
    if problems or source == -1:
        return problems + _check_index(c)
    if source not in c.index_source_layer_ids:
        problems.append(f"candidate_source_layer_id: expected -1 or an index source of {list(c.index_source_layer_ids)}, found {source}")
    elif any(c.kv_source(i) != c.kv_source(source) for i in c.index_source_layer_ids if i > source):
        problems.append(f"candidate_source_layer_id: expected no KV source between it and a later index source, found {source}")
    if c.candidate_topk_blocks < 1 or c.candidate_block_size < 1:
        found = f"{c.candidate_topk_blocks}, {c.candidate_block_size}"
        problems.append(f"candidate_topk_blocks, candidate_block_size: expected positive numbers, found {found}")
    return problems + _check_index(c)


def _check_index(c: ModelConfig) -> list[str]:
    if not c.index_source_layer_ids:
        return []
    problems = []
    for name in ("index_n_heads", "index_topk"):
        if getattr(c, name) < 1:
            problems.append(f"{name}: expected a positive number, found {getattr(c, name)}")
    width = c.index_head_dim
    if width < 1 or width % 32 or width < c.qk_rope_head_dim:
        problems.append(f"index_head_dim: expected a multiple of 32, at least qk_rope_head_dim {c.qk_rope_head_dim}, found {width}")
    return problems


def _check_engram(c: ModelConfig) -> list[str]:
    ids = c.engram_layer_ids
    problems = []
    if any(b <= a for a, b in itertools.pairwise(ids)) or not all(0 <= i < c.num_hidden_layers for i in ids):
        problems.append(f"engram_layer_ids: expected ascending layer ids below {c.num_hidden_layers}, found {list(ids)!r:.80}")
    if len(c.engram_num_embeddings) != len(ids) or any(n < 1 for n in c.engram_num_embeddings):
        problems.append(f"engram_num_embeddings: expected {len(ids)} positive numbers, found {list(c.engram_num_embeddings)!r:.80}")
    for name, least in (("engram_max_ngram_size", 2), ("engram_vocab_size", 2), ("engram_n_heads", 1), ("engram_compressed_vocab_size", 1)):
        if getattr(c, name) < least:
            problems.append(f"{name}: expected at least {least}, found {getattr(c, name)}")
    if c.engram_max_ngram_size > MAX_NGRAM_SIZE or c.engram_n_heads > MAX_NGRAM_HEADS:
        found = f"{c.engram_max_ngram_size}, {c.engram_n_heads}"
        problems.append(f"engram_max_ngram_size, engram_n_heads: expected at most {MAX_NGRAM_SIZE}, {MAX_NGRAM_HEADS}, found {found}")
    if c.engram_head_dim < 1 or c.engram_head_dim % 32:
        problems.append(f"engram_head_dim: expected a multiple of 32, found {c.engram_head_dim}")
    if c.engram_compressed_vocab_size > c.vocab_size:
        problems.append(f"engram_compressed_vocab_size: expected at most {c.vocab_size}, found {c.engram_compressed_vocab_size}")
    if not 0 <= c.engram_pad_token_id < c.vocab_size:
        problems.append(f"engram_pad_token_id: expected an id below vocab_size {c.vocab_size}, found {c.engram_pad_token_id}")
    return problems


def _cut_ratios(values: dict[str, Any]) -> dict[str, Any]:
    """Ratios past the last layer belong to the draft layers; the flat layout may leave them out."""
    ratios, layers = values.get("compress_ratios"), values.get("num_hidden_layers")
    if isinstance(ratios, list) and type(layers) is int and layers > 0:
        return values | {"compress_ratios": ratios[:layers]}
    return values


def _disagreements(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if len(found) < 2:
        return []
    (name_a, a), (name_b, b) = found.items()
    return [
        f"{key}: {name_a} says {a[key]!r:.80}, {name_b} says {b[key]!r:.80}; they must agree: restore the file that was changed"
        for key in a
        if key in b and a[key] != b[key]
    ]


def _special_tokens(directory: Path) -> dict[str, Any]:
    """BOS and EOS ids by way of the tokenizer's files: the flat layout does not state them. Empty when they do not say."""
    try:
        settings = json.loads((directory / "tokenizer_config.json").read_bytes())
        added = json.loads((directory / "tokenizer.json").read_bytes())["added_tokens"]
        ids = {token["content"]: token["id"] for token in added}
        names = {key: settings[key.removesuffix("_id")] for key in layouts.TOKEN_KEYS}
        texts = {key: token["content"] if isinstance(token, dict) else token for key, token in names.items()}
        return {key: ids[text] for key, text in texts.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
