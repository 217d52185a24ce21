"""Rows in vLLM's paged caches: [blocks, rows per block, width], strided over the blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import operator


@operator
def scatter_rows(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Write rows [T, width] to ``cache`` [blocks, per_block, width] in place.

    slots: [T, 2] int32, block and row in it; a negative block writes nothing. Slots do not repeat.
    """
    for value, (block, row) in zip(rows, slots.tolist(), strict=True):
        if block >= 0:
            cache[block, row] = value.to(cache.dtype)


@scatter_rows.register("cpu")
def _scatter_rows_cpu(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    keep = (slots[:, 0] >= 0).nonzero().squeeze(1)
    block, row = slots[keep].long().unbind(1)
    cache[block, row] = rows[keep].to(cache.dtype)


@operator
def gather_rows(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows at ``slots`` (any shape, int64) -> [..., width] in the cache's dtype; -1 gives zeros.

    Blocks are handed on without being cleared, so a row that is not the request's may hold NaN: zeros
    are put in its place, it is not multiplied by zero.
    """
    out = torch.zeros(*slots.shape, cache.shape[2], dtype=cache.dtype, device=cache.device)
    valid = slots >= 0
    chosen = slots[valid]
    out[valid] = cache[chosen // cache.shape[1], chosen % cache.shape[1]]
    return out


@gather_rows.register("cpu")
def _gather_rows_cpu(cache: Tensor, slots: Tensor) -> Tensor:
    per_block = cache.shape[1]
    flat = slots.flatten()
    safe = flat.clamp_min(0)
    out = cache[safe // per_block, safe % per_block]
    out[flat < 0] = 0
    return out.view(*slots.shape, cache.shape[2])


def paged_slots(block_table: Tensor, request: Tensor, index: Tensor, per_block: int) -> Tensor:
    """Slot of row ``index`` of a request: block_table [R, blocks] int32, request [...] int64 and
    index [...] int64 of broadcastable shapes -> [...] int64. A negative index gives -1."""
    safe = index.clamp_min(0)
    block = block_table[request, safe // per_block].long()
    return torch.where(index >= 0, block * per_block + safe % per_block, -1)
