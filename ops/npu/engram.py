"""Engram look-up: Triton-Ascend kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..engram import engram_lookup, engram_lookup_mapped


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
