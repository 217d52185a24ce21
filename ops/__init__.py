"""Operators of DeepSeek-V4.1: one public function each, several implementations (see ``registry``)."""

from .cache import gather_rows, paged_slots, scatter_rows
from .compressor import pool_pairs
from .engram import DEAD, engram_inject, engram_lookup, engram_lookup_mapped, hash_ngrams
from .hyper_connections import hc_coefficients, hc_collapse, hc_expand
from .indexer import select_rows
from .linear import float_linear, grouped_linear
from .moe import moe_float, moe_w8a8, route, swiglu
from .norm import rms_norm
from .registry import Operator, OperatorError, operators, overrides, report
from .rope import apply_rope, rope_cos_sin, rope_frequencies
from .sparse_attention import sparse_attention
from .w8a8 import quantize_channels, quantize_engram_rows, quantize_per_token, w8a8_matmul

__all__ = [
    "DEAD",
    "Operator",
    "OperatorError",
    "apply_rope",
    "engram_inject",
    "engram_lookup",
    "engram_lookup_mapped",
    "float_linear",
    "gather_rows",
    "grouped_linear",
    "hash_ngrams",
    "hc_coefficients",
    "hc_collapse",
    "hc_expand",
    "moe_float",
    "moe_w8a8",
    "operators",
    "overrides",
    "paged_slots",
    "pool_pairs",
    "quantize_channels",
    "quantize_engram_rows",
    "quantize_per_token",
    "report",
    "rms_norm",
    "rope_cos_sin",
    "rope_frequencies",
    "route",
    "scatter_rows",
    "select_rows",
    "sparse_attention",
    "swiglu",
    "w8a8_matmul",
]
