"""Engram's hashes on Ascend NPUs, in Triton-Ascend: a program takes one layer of every n-th token.

64-bit products, exclusive ors and remainders are made one at a time, on the scalar unit: vectors have no such
remainder.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

REQUESTS = 256  # fewer take the same binary: nothing is compiled while a server serves

PROGRAMS = 4096  # times layers: a device takes fewer than 65,536


@triton.jit(do_not_specialize=["tokens", "requests"])
def rows(
    ids, token_map, lookback, query_start, multipliers, primes, offsets, out, tokens, requests, pad,
    ORDERS: tl.constexpr, HEADS: tl.constexpr, REQUESTS_PAD: tl.constexpr,
):  # fmt: skip
    """See ``ops.ngram_rows``; ORDERS: ids that the longest n-gram has. out [layers, T, (ORDERS - 1) HEADS] int64."""
    layer = tl.program_id(1)
    other = tl.arange(0, REQUESTS_PAD)
    start = tl.load(query_start + 1 + other, other < requests - 1, 2147483647)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        request = tl.sum((start <= token).to(tl.int32), 0)
        place = token - tl.load(query_start + request)
        own = tl.load(token_map + tl.load(ids + token).to(tl.int64)).to(tl.int64)
        dead = own < 0
        rolling = tl.where(dead, pad, own) * tl.load(multipliers + layer * ORDERS)
        for back in tl.static_range(1, ORDERS):
            here = place >= back
            before = tl.minimum(tl.maximum(back - 1 - place, 0), ORDERS - 2)
            older = tl.load(lookback + request * (ORDERS - 1) + before).to(tl.int64)
            newer = tl.load(ids + tl.maximum(token - back, 0)).to(tl.int64)
            known = tl.where(here, newer, older)
            mapped = tl.load(token_map + tl.maximum(known, 0)).to(tl.int64)
            dead = dead | (known < 0) | (mapped < 0)
            rolling = rolling ^ (tl.where(dead, pad, mapped) * tl.load(multipliers + layer * ORDERS + back))
            for head in tl.static_range(HEADS):
                column = (back - 1) * HEADS + head
                prime = tl.load(primes + layer * (ORDERS - 1) * HEADS + column)
                rest = rolling % prime
                rest = tl.where(rest < 0, rest + prime, rest)
                at = (layer * tokens + token) * ((ORDERS - 1) * HEADS) + column
                tl.store(out + at, rest + tl.load(offsets + layer * (ORDERS - 1) * HEADS + column))


def ngram_rows_npu(
    ids: Tensor,
    token_map: Tensor,
    lookback: Tensor,
    query_start: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad: int,
) -> Tensor:
    """``ops.ngram_rows`` on an NPU."""
    layers, orders, heads = primes.shape
    requests = len(query_start) - 1
    out = torch.empty(layers, len(ids), orders * heads, dtype=torch.int64, device=ids.device)
    if len(ids):
        rows[(min(len(ids), PROGRAMS), layers)](
            ids, token_map, lookback, query_start, multipliers, primes, offsets, out, len(ids), requests, pad,
            ORDERS=orders + 1, HEADS=heads, REQUESTS_PAD=max(triton.next_power_of_2(requests), REQUESTS),
        )  # fmt: skip
    return out
