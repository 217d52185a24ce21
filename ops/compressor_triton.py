"""Open groups of the compressor on Ascend NPUs, in Triton-Ascend: a program takes every n-th token.

All reads of the ring come before all writes, in two kernels: programs run in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from .batch import Batch

REQUESTS = 256  # fewer take the same binary: nothing is compiled while a server serves

PROGRAMS = 4096  # a device takes fewer than 65,536


@triton.jit
def _place(token, query_start, lengths, requests, REQUESTS_PAD: tl.constexpr):
    """Request of a token, its place among those of this step, its position, and the request's last position."""
    other = tl.arange(0, REQUESTS_PAD)
    start = tl.load(query_start + 1 + other, other < requests - 1, 2147483647)
    request = tl.sum((start <= token).to(tl.int32), 0)
    last = tl.load(lengths + request) - 1
    return request, token - tl.load(query_start + request), last - tl.load(query_start + request + 1) + 1 + token, last


@triton.jit(do_not_specialize=["tokens", "requests"])
def pool(
    inputs, ring, table, query_start, lengths, out, tokens, requests, table_stride, ring_stride, capacity,
    WIDTH: tl.constexpr, PAD: tl.constexpr, REQUESTS_PAD: tl.constexpr,
):  # fmt: skip
    """inputs [T, 2 WIDTH], values then gates; ring [blocks, capacity, 2 WIDTH] -> out [T, WIDTH]; all float32."""
    column = tl.arange(0, PAD)
    inside = column < WIDTH
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        request, place, position, _ = _place(token, query_start, lengths, requests, REQUESTS_PAD)
        own = inputs + tl.cast(token, tl.int64) * (2 * WIDTH)
        value, gate = tl.load(own + column, inside, 0.0), tl.load(own + WIDTH + column, inside, 0.0)
        if place > 0:
            earlier_value = tl.load(own - 2 * WIDTH + column, inside, 0.0)
            earlier_gate = tl.load(own - WIDTH + column, inside, 0.0)
        else:  # a ring may hold anything in front of position 0
            block = tl.maximum(tl.load(table + request * table_stride), 0).to(tl.int64)
            at = ring + block * ring_stride + tl.maximum(position - 1, 0) % capacity * (2 * WIDTH)
            earlier_value = tl.where(position > 0, tl.load(at + column, inside, 0.0), 0.0)
            earlier_gate = tl.where(position > 0, tl.load(at + WIDTH + column, inside, 0.0), 0.0)
        share = 1.0 / (1.0 + tl.exp(earlier_gate - gate))  # a softmax of two is a sigmoid
        pooled = earlier_value + (value - earlier_value) * share
        tl.store(out + tl.cast(token, tl.int64) * WIDTH + column, pooled, inside)


@triton.jit(do_not_specialize=["tokens", "requests"])
def keep(
    inputs, ring, table, query_start, lengths, slots, tokens, requests, table_stride, ring_stride, capacity,
    WIDTH: tl.constexpr, PAD: tl.constexpr, REQUESTS_PAD: tl.constexpr,
):  # fmt: skip
    """Rows of each request's last ``capacity`` tokens to its ring. inputs [T, WIDTH]."""
    column = tl.arange(0, PAD)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        request, _, position, last = _place(token, query_start, lengths, requests, REQUESTS_PAD)
        wanted = (position > last - capacity) & (position >= 0) & (position <= last)
        if wanted & (tl.load(slots + token) >= 0):
            row = tl.load(inputs + tl.cast(token, tl.int64) * WIDTH + column, column < WIDTH, 0.0)
            block = tl.load(table + request * table_stride).to(tl.int64)
            tl.store(ring + block * ring_stride + position % capacity * WIDTH + column, row, column < WIDTH)


def pool_open_groups_npu(inputs: Tensor, ring: Tensor, table: Tensor, batch: Batch, slots: Tensor) -> Tensor:
    """``ops.pool_open_groups`` on an NPU."""
    tokens, width = inputs.shape
    out = torch.empty(tokens, width // 2, dtype=torch.float32, device=inputs.device)
    if tokens:
        grid = (min(tokens, PROGRAMS),)
        places = table, batch.query_start, batch.lengths
        strides = tokens, batch.requests, table.stride(0), ring.stride(0), ring.shape[1]
        pad, requests = triton.next_power_of_2(width), max(triton.next_power_of_2(batch.requests), REQUESTS)
        inputs = inputs.contiguous()
        pool[grid](inputs, ring, *places, out, *strides, WIDTH=width // 2, PAD=pad // 2, REQUESTS_PAD=requests)
        keep[grid](inputs, ring, *places, slots, *strides, WIDTH=width, PAD=pad, REQUESTS_PAD=requests)
    return out
