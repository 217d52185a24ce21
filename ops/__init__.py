"""Operators of DeepSeek-V4.1: one public function each, several implementations (see ``registry``)."""

from .batch import Batch, Blocks
from .cache import gather_rows, paged_slots, scatter_rows
from .compressor import pool_open_groups, pool_pairs
from .engram import DEAD, engram_inject, engram_lookup, engram_lookup_mapped, hash_ngrams, ngram_rows
from .hyper_connections import hc_coefficients, hc_collapse, hc_expand, hc_pre
from .indexer import int8_index_keys, quantize_index, select_rows, underflows
from .latents import store_compressed, store_latents
from .linear import float_linear, grouped_linear
from .moe import NEVER, moe_float, moe_w8a8, route, swiglu
from .norm import rms_norm, rms_norm_cast, rms_norm_quantize
from .plan import plan
from .registry import Operator, OperatorError, operators, overrides, report
from .rope import Rotation, apply_rope, rope_frequencies, rope_rotation
from .sparse_attention import block_attention, sparse_attention
from .w8a8 import quantize_channels, quantize_engram_rows, quantize_per_token, w8a8_matmul

__all__ = [
    "DEAD",
    "NEVER",
    "Batch",
    "Blocks",
    "Operator",
    "OperatorError",
    "Rotation",
    "apply_rope",
    "block_attention",
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
    "hc_pre",
    "int8_index_keys",
    "moe_float",
    "moe_w8a8",
    "ngram_rows",
    "operators",
    "overrides",
    "paged_slots",
    "plan",
    "pool_open_groups",
    "pool_pairs",
    "quantize_channels",
    "quantize_engram_rows",
    "quantize_index",
    "quantize_per_token",
    "report",
    "rms_norm",
    "rms_norm_cast",
    "rms_norm_quantize",
    "rope_frequencies",
    "rope_rotation",
    "route",
    "scatter_rows",
    "select_rows",
    "sparse_attention",
    "store_compressed",
    "store_latents",
    "swiglu",
    "underflows",
    "w8a8_matmul",
]
