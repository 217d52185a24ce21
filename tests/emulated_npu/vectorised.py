"""What our Triton kernels compute, by the references of their operators, for tests of whole engines: the interpreter
takes 7 ms a token and layer. ``EMULATED_TRITON=vectorised`` asks for it; test_adapters.py interprets the kernels, and
test_model.py's first test does, too.

Arguments are the kernels' own, as views of device memory; sizes and strides must be those of the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_ascend_dsv41 import ops
from vllm_ascend_dsv41.ops.registry import REFERENCE


def latents(
    q: Tensor,
    kv: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    *numbers: Any,
    HEADS: int,
    WIDTH: int,
    ROPE: int,
    SLOTS: bool,
    HEAD_PAD: int,
    PLAIN_PAD: int,
    PAIR_PAD: int,
) -> None:
    *sizes, eps = numbers
    assert sizes == [len(kv), kv.stride(0), cache.stride(0), cache.shape[1]]
    assert (kv.shape[1], 2 * cos.shape[1]) == (WIDTH, ROPE)
    assert PLAIN_PAD >= WIDTH - ROPE
    assert PAIR_PAD >= ROPE // 2
    assert cache.stride(1) == WIDTH
    assert not HEADS or (q.shape[1:] == (HEADS, WIDTH) and q.is_contiguous() and HEAD_PAD > 0)
    run = ops.store_latents.implementations[REFERENCE]
    turned = run(q if HEADS else None, kv, weight, eps, ops.Rotation(cos, sin), cache, slots if SLOTS else None)
    if turned is not None:
        q.copy_(turned)


def compressed(
    latent: Tensor,
    key: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    row_slots: Tensor,
    key_slots: Tensor,
    rows: Tensor,
    keys: Tensor,
    scales: Tensor,
    *numbers: Any,
    WIDTH: int,
    INDEX: int,
    ROPE: int,
    RATIO: int,
    CODES: bool,
    PLAIN_PAD: int,
    INDEX_PAD: int,
    PAIR_PAD: int,
) -> None:
    *sizes, eps = numbers
    assert sizes == [len(latent), rows.stride(0), rows.shape[1], keys.stride(0), keys.shape[1], scales.stride(0)]
    assert (latent.shape[1], key.shape[1], 2 * cos.shape[1]) == (WIDTH, INDEX, ROPE)
    assert (rows.stride(1), keys.stride(1)) == (WIDTH, INDEX)
    assert latent.is_contiguous()
    assert key.is_contiguous()
    assert min(PLAIN_PAD - WIDTH, INDEX_PAD - INDEX) >= -ROPE
    assert PAIR_PAD >= ROPE // 2
    run = ops.store_compressed.implementations[REFERENCE]
    own = (latent, key, weight, eps, ops.Rotation(cos, sin))
    run(*own, rows, row_slots, keys, scales if CODES else None, key_slots, RATIO)


def inject(
    streams: Tensor,
    kv: Tensor,
    weight: Tensor,
    dead: Tensor,
    out: Tensor,
    tokens: int,
    kv_stride: int,
    eps: float,
    HC: int,
    DIM: int,
    PART: int,
) -> None:
    assert (tokens, kv_stride, HC, DIM) == (len(kv), kv.stride(0), *streams.shape[1:])
    assert streams.is_contiguous()
    assert weight.is_contiguous()
    assert PART > 0
    out.copy_(ops.engram_inject.implementations[REFERENCE](streams, kv, weight, dead, eps))


def rows(*arguments: Any, ORDERS: int, HEADS: int, REQUESTS_PAD: int) -> None:
    *own, out, tokens, requests, pad = arguments
    ids, _, lookback, start, _, primes, _ = own
    assert (tokens, requests) == (len(ids), len(start) - 1)
    assert primes.shape[1:] == (ORDERS - 1, HEADS)
    assert len(lookback) >= requests
    assert requests <= REQUESTS_PAD
    out.copy_(ops.ngram_rows.implementations[REFERENCE](*own, pad))


def _batch(inputs: Tensor, ring: Tensor, table: Tensor, start: Tensor, lengths: Tensor, *sizes: int) -> ops.Batch:
    tokens, requests, *strides = sizes
    assert strides == [table.stride(0), ring.stride(0), ring.shape[1]]
    assert (tokens, requests) == (len(inputs), len(lengths))
    assert requests == len(start) - 1
    assert inputs.is_contiguous()
    return ops.Batch(start, lengths, tokens)


def pool(
    inputs: Tensor, ring: Tensor, table: Tensor, start: Tensor, lengths: Tensor, out: Tensor, *sizes: int,
    WIDTH: int, PAD: int, REQUESTS_PAD: int,
) -> None:  # fmt: skip
    batch = _batch(inputs, ring, table, start, lengths, *sizes)
    assert 2 * WIDTH == inputs.shape[1] == ring.shape[2]
    assert WIDTH <= PAD
    assert batch.requests <= REQUESTS_PAD
    slots = torch.full((len(inputs),), -1)  # nothing is kept
    out.copy_(ops.pool_open_groups.implementations[REFERENCE](inputs, ring, table, batch, slots))


def keep(
    inputs: Tensor, ring: Tensor, table: Tensor, start: Tensor, lengths: Tensor, slots: Tensor, *sizes: int,
    WIDTH: int, PAD: int, REQUESTS_PAD: int,
) -> None:  # fmt: skip
    batch = _batch(inputs, ring, table, start, lengths, *sizes)
    assert inputs.shape[1] == WIDTH
    assert WIDTH <= PAD
    assert batch.requests <= REQUESTS_PAD
    ops.pool_open_groups.implementations[REFERENCE](inputs, ring, table, batch, slots)


KERNELS: dict[str, Callable[..., None]] = {f.__name__: f for f in (latents, compressed, inject, rows, pool, keep)}
