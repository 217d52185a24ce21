"""Pooling of neighbouring tokens into one compressed row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .batch import Batch
from .cache import gather_rows, scatter_rows
from .registry import REFERENCE, operator


@operator
def pool_pairs(first: Tensor, second: Tensor) -> Tensor:
    """Pool two tokens channel by channel, weighted by a softmax of their gates.

    first, second: [T, 2 d] float32, values then gates -> [T, d] float32. Source: spec section 3.5
    (ratio 2, no overlap, no positional term).
    """
    kv = torch.stack((first, second), dim=1)
    values, gates = kv.chunk(2, dim=-1)
    return (values * gates.softmax(dim=1)).sum(1)


@pool_pairs.register("cpu")
def _pool_pairs_cpu(first: Tensor, second: Tensor) -> Tensor:
    (a, gate_a), (b, gate_b) = first.chunk(2, dim=-1), second.chunk(2, dim=-1)
    return torch.lerp(a, b, torch.sigmoid(gate_b - gate_a))  # a softmax of two is a sigmoid


@operator
def pool_open_groups(inputs: Tensor, ring: Tensor, table: Tensor, batch: Batch, slots: Tensor) -> Tensor:
    """``pool_pairs`` of every token and the one before it, and the inputs of each request's last tokens are kept.

    inputs: [T, 2 d] float32; ring: [blocks, capacity, 2 d] float32, where the input of position p lies in row ``p %
    capacity``; table: [R, 1 or more] int32, the block of each request in its first column; slots: [T], negative for
    tokens that are padding. The token before a request's first of this step comes from its ring, zeros before position
    0. Returns [T, d] float32. Source: spec section 3.5.
    """
    parts = (op.implementations[REFERENCE] for op in (gather_rows, scatter_rows, pool_pairs))
    return _pooled(inputs, ring, table, batch, slots, *parts)


def _pooled(
    inputs: Tensor, ring: Tensor, table: Tensor, batch: Batch, slots: Tensor, gather: Any, scatter: Any, pool: Any
) -> Tensor:
    capacity, first = ring.shape[1], table[:, 0].long()
    before = batch.lengths - (batch.query_start[1:] - batch.query_start[:-1]) - 1
    rows = torch.where(before >= 0, first * capacity + before % capacity, -1)
    earlier = gather(ring, rows).index_select(0, batch.request)
    previous = torch.where(batch.first[:, None], earlier, inputs.roll(1, 0))
    # padding, and idle steps, whose table may name a request's ring, have no slot
    kept = (batch.positions > batch.last - capacity) & (slots >= 0)
    block = torch.where(kept, first.index_select(0, batch.request), -1)
    scatter(ring, inputs, torch.stack((block, batch.positions % capacity), dim=1).int())
    result: Tensor = pool(previous, inputs)
    return result


@pool_open_groups.register("cpu")
def _pool_open_groups_cpu(inputs: Tensor, ring: Tensor, table: Tensor, batch: Batch, slots: Tensor) -> Tensor:
    return _pooled(inputs, ring, table, batch, slots, gather_rows, scatter_rows, pool_pairs)
