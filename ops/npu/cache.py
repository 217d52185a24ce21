"""Rows of paged caches."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache import gather_rows, scatter_rows


@scatter_rows.register("npu")
def _scatter_rows(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """The kernel follows the stride between blocks and skips negative coordinates; rows must be contiguous
    (vllm-ascend #17647: it lost some of others)."""
    torch.ops._C_ascend.npu_scatter_nd_update_sk(cache, slots, rows.contiguous())


@gather_rows.register("npu")
def _gather_rows(cache: Tensor, slots: Tensor) -> Tensor:
    """Whole blocks, then the row of each: for the few rows that open groups need."""
    flat, per_block = slots.flatten(), cache.shape[1]
    safe = flat.clamp_min(0)
    blocks = cache.index_select(0, torch.div(safe, per_block, rounding_mode="floor"))
    row = (safe % per_block)[:, None, None].expand(-1, 1, cache.shape[2])
    rows = blocks.gather(1, row)[:, 0]
    return torch.where((flat >= 0)[:, None], rows, 0).view(*slots.shape, cache.shape[2])
