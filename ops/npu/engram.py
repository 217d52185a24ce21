"""Engram: Triton-Ascend kernels of hashes, look-up and gate."""

from __future__ import annotations

import torch
from torch import Tensor

from ..engram import engram_inject, engram_lookup, engram_lookup_mapped, ngram_rows
from ..registry import REFERENCE


@engram_lookup.register("npu")
def _lookup(table: Tensor, scale: Tensor | None, ids: Tensor, dtype: torch.dtype) -> Tensor:
    from ..engram_triton import lookup_npu

    return lookup_npu(table, scale, ids, dtype)


@engram_lookup_mapped.register("npu")
def _lookup_mapped(
    addresses: Tensor, ids: Tensor, rows: int, chunk_rows: int, dim: int, groups: int, dtype: torch.dtype
) -> Tensor:
    from ..engram_triton import lookup_mapped_npu

    return lookup_mapped_npu(addresses, ids, rows, chunk_rows, dim, groups, dtype)


@ngram_rows.register("npu")
def _ngram_rows(
    ids: Tensor,
    token_map: Tensor,
    lookback: Tensor,
    query_start: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad: int,
) -> Tensor:
    from ..ngrams_triton import ngram_rows_npu

    return ngram_rows_npu(ids, token_map, lookback.contiguous(), query_start, multipliers, primes, offsets, pad)


@engram_inject.register("npu")
def _inject(
    streams: Tensor, kv: Tensor, qk_weight: Tensor, dead: Tensor, eps: float, rotation: Tensor | None = None
) -> Tensor:
    from ..gate_triton import engram_inject_npu

    if rotation is not None:  # of rotated checkpoints the query is turned back first
        return engram_inject.implementations[REFERENCE](streams, kv, qk_weight, dead, eps, rotation)
    return engram_inject_npu(streams, kv, qk_weight, dead, eps)
