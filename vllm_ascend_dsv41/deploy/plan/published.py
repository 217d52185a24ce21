"""Figures that others published of the released model, beside what this package computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ...layer_plan import ModelPlan
from ...quant.inventory import Kind, Weights
from .device import GIB
from .weights import Tensors, official_kinds, official_per_rank, table_bytes


def comparisons(config: Mapping[str, Any], tensors: Tensors) -> list[dict[str, Any]]:
    """name, published, computed, unit, deviation in percent, note."""
    stored = _by_format(tensors)
    tables = official_kinds(tensors)["Engram tables"]
    h200 = sum(official_per_rank(tensors, config["text_config"], 4).values())
    rows: list[tuple[str, float, float, str, str]] = [
        ("routed and draft experts, MXFP4", 259.5, stored["experts"] / GIB, "GiB", ""),
        ("Engram tables, FP8", 183.1, stored["tables"] / GIB, "GiB", ""),
        (
            "attention, dense projections, FP8",
            6.9,
            stored["dense"] / GIB,
            "GiB",
            "the recipe counts the BF16 routers here",
        ),
        ("UE8M0 scales", 21.9, stored["scales"] / GIB, "GiB", ""),
        ("embedding, head, norms and all else", 3.9, stored["other"] / GIB, "GiB", "with the vision tower"),
        ("whole checkpoint", 476, sum(stored.values()) / GIB, "GiB", "files are 511 GB; 475.2 GiB of tensors"),
        ("global cache per token, official formats", 890, official_token_bytes(config), "bytes", ""),
        ("Engram per card at TP4", 47.2, tables / 4 / GIB, "GiB", "codes and scales"),
        ("Engram per card at TP2", 94.4, tables / 2 / GIB, "GiB", "codes and scales"),
        ("weights per card, H200 TP4, tables offloaded", 81.2, h200 / GIB, "GiB", "experts in tiles of 128 columns"),
        (
            "weights per card, MI325X TP2, tables offloaded",
            145,
            sum(official_per_rank(tensors, config["text_config"], 2).values()) / GIB,
            "GiB",
            "",
        ),
        (
            "moved off a card by offload, H200 TP4",
            23.6,
            tables / 4 / GIB,
            "GiB",
            "does not agree with the recipe's own 47.2",
        ),
        ("INT8 tables with FP32 scales", 206.0, table_bytes(tensors, Weights.W8A8, 1) / GIB, "GiB", ""),
    ]
    return [
        {
            "name": name,
            "published": published,
            "computed": round(computed, 2),
            "unit": unit,
            "deviation_percent": round(100 * (computed / published - 1), 1),
            "note": note,
        }
        for name, published, computed, unit, note in rows
    ]


def official_token_bytes(config: Mapping[str, Any]) -> float:
    """Bytes of the global cache per token in the official formats: rows in FP4 with an E4M3 scale per 16, index keys in
    FP4 with a scale per 32 (spec section 3.4)."""
    text = config["text_config"]
    row = text["head_dim"] // 2 + text["head_dim"] // 16
    key = text["index_head_dim"] // 2 + text["index_head_dim"] // 32
    return sum((row + key) / layer.ratio for layer in ModelPlan.from_config(config).trunk if layer.is_kv_source)


def _by_format(tensors: Tensors) -> dict[str, int]:
    """Bytes of the official checkpoint as the recipe's table divides them."""
    held: dict[str, int] = defaultdict(int)
    for kind, spec in tensors:
        for item in spec.official():
            if item.dtype == "F8_E8M0":
                name = "scales"
            elif spec.kind is Kind.EXPERT:
                name = "experts"
            elif spec.kind is Kind.TABLE:
                name = "tables"
            elif item.dtype == "F8_E4M3" or kind == "compressors and indexers":
                name = "dense"
            else:
                name = "other"
            held[name] += item.bytes
    return dict(held)
