"""Weights of one rank, by kind, from the inventory of the checkpoint: computed, not estimated."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...quant.inventory import DTYPE_BYTES, Kind, TensorSpec, Weights, inventory

VOCABULARY_PADDING = 64  # of vLLM's VocabParallelEmbedding, per rank
#: Columns that MXFP4 kernels of CUDA and ROCm take at a time. At TP4 it explains the 81 GiB of vLLM's recipe.
EXPERT_TILE = 128

#: (pattern of the tensor's name, kind in the report), the first that fits.
KINDS = (
    (r"\.experts\.", "routed experts"),
    (r"\.shared_experts\.", "shared experts"),
    (r"\.engram\.embed\.", "Engram tables"),
    (r"\.engram\.", "Engram projections"),
    (r"^(vision|aligner|image_)", "vision tower"),
    (r"^(embed|head)\.|\.(embed|head)\.weight$|markov", "embedding and heads"),
    (r"\.(compressor|indexer)\.", "compressors and indexers"),
    (r"\.attn\.", "attention"),
    (r"", "gates, hyper-connections, norms"),
)
#: Of the vision tower, split among the ranks that it is divided among.
SPLIT_TOWER = re.compile(r"attn\.wqkv\.|attn\.wo\.weight|mlp\.|aligner\.w1\.|aligner\.w2\.weight")
#: Split among tensor-parallel ranks by this model; everything else is whole on each rank.
SPLIT = re.compile(r"attn\.(wq_b|wo_a|wo_b)\.|attn_sink|shared_experts|engram\.wkv|^(embed|head)\.weight")


@dataclass(frozen=True)
class Division:
    """How a model is divided: tensor-parallel ranks, ranks that experts are divided among (1: by their inner size,
    among the tensor-parallel ranks), whether drafts are served, whether the checkpoint's streams are rotated, and ranks
    that the vision tower is divided among (0: not loaded)."""

    tensor: int = 1
    experts: int = 1
    draft: bool = True
    rotated: bool = False
    tower: int = 1


def kind_of(name: str) -> str:
    """What a tensor belongs to, as the report calls it."""
    return next(kind for pattern, kind in KINDS if re.search(pattern, name))


Tensors = Sequence[tuple[str, TensorSpec]]


def by_kind(config: Mapping[str, Any]) -> Tensors:
    """Every tensor of a checkpoint's config with its kind. Raises ConfigError."""
    return [(kind_of(spec.name), spec) for spec in inventory(config)]


def per_rank(tensors: Tensors, text: Mapping[str, Any], weights: Weights, division: Division) -> dict[str, int]:
    """Bytes of parameters that one rank of this package's model holds, by kind; the Engram tables apart.

    ``text``: the checkpoint's text_config.
    """
    held: dict[str, int] = defaultdict(int)
    for kind, spec in tensors:
        left_out = {"Engram tables": True, "vision tower": division.tower == 0}.get(kind, False)
        if left_out or (spec.name.startswith("mtp.") and not division.draft):
            continue
        held[kind] += _bytes(spec, weights, division)
    if division.draft and division.rotated and text.get("num_nextn_predict_layers"):
        # the draft keeps the original basis: its own embedding and head
        held["embedding and heads"] += _padded(text["vocab_size"], division.tensor) * text["hidden_size"] * (2 + 4)
    return dict(held)


def table_bytes(tensors: Tensors, weights: Weights, shards: int) -> int:
    """Bytes of the Engram tables that the fullest of ``shards`` holders has, whole hash columns each. Upper bound: the
    columns of a table differ in rows by less than one in a thousand."""
    total = sum(item.bytes for _, spec in tensors if spec.kind is Kind.TABLE for item in spec.ascend(weights))
    return -(-total // shards)


def official_kinds(tensors: Tensors) -> dict[str, int]:
    """Bytes of the official checkpoint by kind."""
    held: dict[str, int] = defaultdict(int)
    for kind, spec in tensors:
        held[kind] += sum(item.bytes for item in spec.official())
    return dict(held)


def official_per_rank(tensors: Tensors, text: Mapping[str, Any], ranks: int, data: int = 1) -> dict[str, int]:
    """Bytes of the official checkpoint that one of ``ranks`` tensor-parallel ranks holds that keep every tensor
    in its stored form, Engram tables apart; experts' slices are padded to whole tiles of the MXFP4 kernels."""
    inner = max(text["moe_intermediate_size"] // ranks, 1)
    padding = -(-inner // EXPERT_TILE) * EXPERT_TILE / inner
    held: dict[str, int] = defaultdict(int)
    for kind, spec in tensors:
        if kind != "Engram tables":
            size = sum(item.bytes for item in spec.official())
            if kind == "routed experts":
                held[kind] += round(size / ranks * padding) if data == 1 else round(size / ranks / data)
            else:
                held[kind] += -(-size // ranks) if SPLIT.search(spec.name) else size
    return dict(held)


def _padded(vocabulary: int, ranks: int) -> int:
    """Rows of a vocabulary that one rank holds."""
    unit = VOCABULARY_PADDING * (ranks if VOCABULARY_PADDING % ranks else 1)
    return math.ceil(vocabulary / unit) * unit // ranks


def _bytes(spec: TensorSpec, weights: Weights, division: Division) -> int:
    name, tensor = spec.name, division.tensor
    if name == "embed.weight":
        return _padded(spec.shape[0], tensor) * spec.shape[1] * 2
    if name == "head.weight":
        return _padded(spec.shape[0], tensor) * spec.shape[1] * 4
    if spec.quantized and weights is Weights.W8A8:
        return _quantized(spec, division)
    size = math.prod(spec.shape)
    if name.endswith(("engram.q_weight", "engram.k_weight")):
        return size * 4 * 3 // 2  # in float32, and their product
    if name.endswith(".gate.weight"):
        return (spec.shape[0] + 1) * spec.shape[1] * 4  # in float32, with the column of image flags
    if name.endswith((".gate.bias", ".gate.bias_vl")):
        return (2 * size + 1) * 4  # as stored, and as the router reads it
    if kind_of(name) == "vision tower":
        size *= 4 if name.startswith("image_") else 2  # the delimiters in float32
        return size // division.tower if SPLIT_TOWER.search(name) else size
    stored = spec.ascend(weights)[0]
    size *= DTYPE_BYTES[stored.dtype]
    if spec.kind is Kind.EXPERT:
        return size // (division.experts if division.experts > 1 else tensor)
    return size // tensor if SPLIT.search(name) else size


def _quantized(spec: TensorSpec, division: Division) -> int:
    """INT8 codes, and a float32 scale per output row that is on this rank."""
    rows, columns = spec.shape
    if spec.kind is Kind.EXPERT and division.experts > 1:
        return (rows * columns + 4 * rows) // division.experts
    if spec.kind is not Kind.EXPERT and not SPLIT.search(spec.name):
        return rows * columns + 4 * rows
    by_columns = spec.name.endswith(("w2.weight", "wo_b.weight"))
    return rows * columns // division.tensor + 4 * (rows if by_columns else rows // division.tensor)
