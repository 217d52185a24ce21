"""Latent rows into paged caches on Ascend NPUs, in Triton-Ascend: a program takes every n-th token.

Neighbouring values turn together: they are read as pairs and split. Widths need not be powers of two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from .rope import Rotation

HEADS_AT_ONCE = 16  # more do not fit the unified buffer
PROGRAMS = 4096  # a device takes fewer than 65,536


@triton.jit
def _normalised(at, plain, pair, weight, eps, WIDTH: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr):
    """A row in three parts, in float32: what does not turn, even and odd values of what does."""
    first: tl.constexpr = WIDTH - ROPE
    kept = plain < first
    pairs = first + 2 * pair[:, None] + tl.arange(0, 2)[None, :]
    rest = tl.load(at + plain, kept, 0.0).to(tl.float32)
    both = tl.load(at + pairs, (pair < ROPE // 2)[:, None], 0.0).to(tl.float32)
    if NORM:
        square = tl.sum(rest * rest, 0) + tl.sum(tl.sum(both * both, 1), 0)
        factor = 1.0 / tl.sqrt(square / WIDTH + eps)
        rest = rest * factor * tl.load(weight + plain, kept, 0.0)
        both = both * factor * tl.load(weight + pairs, (pair < ROPE // 2)[:, None], 0.0)
    even, odd = tl.split(both)
    return rest, even, odd


@triton.jit
def _store(at, plain, pair, rest, even, odd, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    first: tl.constexpr = WIDTH - ROPE
    pairs = first + 2 * pair[:, None] + tl.arange(0, 2)[None, :]
    tl.store(at + plain, rest.to(at.dtype.element_ty), plain < first)
    tl.store(at + pairs, tl.join(even, odd).to(at.dtype.element_ty), (pair < ROPE // 2)[:, None])


@triton.jit(do_not_specialize=["tokens", "kv_stride", "block_stride", "per_block"])
def latents(
    q, kv, weight, cos, sin, slots, cache, tokens, kv_stride, block_stride, per_block, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, SLOTS: tl.constexpr,
    HEAD_PAD: tl.constexpr, PLAIN_PAD: tl.constexpr, PAIR_PAD: tl.constexpr,
):  # fmt: skip
    """q [T, HEADS, WIDTH] turned in place (HEADS 0: none); kv [T, WIDTH] normalised, turned, stored; cos, sin
    [T, ROPE / 2]; SLOTS: whether there are slots."""
    plain, pair = tl.arange(0, PLAIN_PAD), tl.arange(0, PAIR_PAD)
    turning = pair < ROPE // 2
    for at_token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = tl.cast(at_token, tl.int64)
        c = tl.load(cos + token * (ROPE // 2) + pair, turning, 0.0)
        s = tl.load(sin + token * (ROPE // 2) + pair, turning, 0.0)
        slot = token
        if SLOTS:
            slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            rest, even, odd = _normalised(kv + token * kv_stride, plain, pair, weight, eps, WIDTH, ROPE, True)
            block = slot // per_block
            at = cache + block * block_stride + (slot - block * per_block) * WIDTH
            _store(at, plain, pair, rest, even * c - odd * s, even * s + odd * c, WIDTH, ROPE)
        if HEADS > 0:
            head = tl.arange(0, HEAD_PAD)
            pairs = 2 * pair[:, None] + tl.arange(0, 2)[None, :]
            for first in range(0, HEADS, HEAD_PAD):
                inside = (first + head < HEADS)[:, None, None] & turning[None, :, None]
                own = q + token * (HEADS * WIDTH) + (WIDTH - ROPE)
                at = own + (first + head[:, None, None]) * WIDTH + pairs[None, :, :]
                even, odd = tl.split(tl.load(at, inside, 0.0).to(tl.float32))
                turned = tl.join(even * c[None, :] - odd * s[None, :], even * s[None, :] + odd * c[None, :])
                tl.store(at, turned.to(q.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["tokens"])
def compressed(
    latent, key, weight, cos, sin, row_slots, key_slots, rows, keys, scales,
    tokens, row_stride, row_per_block, key_stride, key_per_block, scale_stride, eps,
    WIDTH: tl.constexpr, INDEX: tl.constexpr, ROPE: tl.constexpr, RATIO: tl.constexpr, CODES: tl.constexpr,
    PLAIN_PAD: tl.constexpr, INDEX_PAD: tl.constexpr, PAIR_PAD: tl.constexpr,
):  # fmt: skip
    """latent [T, WIDTH] turned and stored; key [T, INDEX] normalised, turned and stored, as INT8 where CODES."""
    pair = tl.arange(0, PAIR_PAD)
    turning = pair < ROPE // 2
    for at_token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = tl.cast(at_token, tl.int64)
        c = tl.load(cos + token * (ROPE // 2) + pair, turning, 0.0)
        s = tl.load(sin + token * (ROPE // 2) + pair, turning, 0.0)
        slot = tl.load(row_slots + token).to(tl.int64)
        if (slot >= 0) & (slot % RATIO == RATIO - 1):
            plain = tl.arange(0, PLAIN_PAD)
            rest, even, odd = _normalised(latent + token * WIDTH, plain, pair, weight, eps, WIDTH, ROPE, False)
            block = slot // (row_per_block * RATIO)
            at = rows + block * row_stride + (slot - block * row_per_block * RATIO) // RATIO * WIDTH
            _store(at, plain, pair, rest, even * c - odd * s, even * s + odd * c, WIDTH, ROPE)
        slot = tl.load(key_slots + token).to(tl.int64)
        if (slot >= 0) & (slot % RATIO == RATIO - 1):
            plain = tl.arange(0, INDEX_PAD)
            rest, even, odd = _normalised(key + token * INDEX, plain, pair, weight, eps, INDEX, ROPE, True)
            first, second = even * c - odd * s, even * s + odd * c
            block = slot // (key_per_block * RATIO)
            row = (slot - block * key_per_block * RATIO) // RATIO
            at = keys + block * key_stride + row * INDEX
            if CODES:
                largest = tl.maximum(tl.max(tl.abs(rest), 0), tl.max(tl.abs(first), 0))
                largest = tl.maximum(largest, tl.max(tl.abs(second), 0))
                scale = largest / 127.0
                tl.store(scales + block * scale_stride + row, scale.to(tl.float16))
                divisor = tl.where(scale > 0.0, scale, 1.0)
                rest, first, second = _rounded(rest / divisor), _rounded(first / divisor), _rounded(second / divisor)
            _store(at, plain, pair, rest, first, second, INDEX, ROPE)


@triton.jit
def _rounded(x):
    """To the nearest integer, ties to even, for magnitudes below 2 ** 22: beyond 2 ** 23 floats are integers."""
    return x + 12582912.0 - 12582912.0


def _pads(*widths: int) -> list[int]:
    return [triton.next_power_of_2(max(width, 1)) for width in widths]


def store_latents_npu(
    q: Tensor | None, kv: Tensor, weight: Tensor, eps: float, rotation: Rotation, cache: Tensor, slots: Tensor | None
) -> Tensor | None:
    """``ops.store_latents`` on an NPU. q is turned in place, cache rows are dense within a block."""
    tokens, width = kv.shape
    heads = 0 if q is None else q.shape[1]
    head_pad, plain_pad, pair_pad = _pads(min(heads, HEADS_AT_ONCE), width - rotation.dim, rotation.dim // 2)
    q = q if q is None else q.contiguous()
    if tokens:
        latents[(min(tokens, PROGRAMS),)](
            kv if q is None else q, kv, weight, rotation.cos, rotation.sin, kv if slots is None else slots, cache,
            tokens, kv.stride(0), cache.stride(0), cache.shape[1], eps,
            HEADS=heads, WIDTH=width, ROPE=rotation.dim, SLOTS=slots is not None,
            HEAD_PAD=head_pad, PLAIN_PAD=plain_pad, PAIR_PAD=pair_pad,
        )  # fmt: skip
    return q


def store_compressed_npu(
    latent: Tensor,
    key: Tensor,
    weight: Tensor,
    eps: float,
    rotation: Rotation,
    rows: Tensor,
    row_slots: Tensor,
    keys: Tensor,
    key_scale: Tensor | None,
    key_slots: Tensor,
    ratio: int,
) -> None:
    """``ops.store_compressed`` on an NPU."""
    (tokens, width), index = latent.shape, key.shape[1]
    plain_pad, index_pad, pair_pad = _pads(width - rotation.dim, index - rotation.dim, rotation.dim // 2)
    scales = keys if key_scale is None else key_scale
    if tokens:
        compressed[(min(tokens, PROGRAMS),)](
            latent.contiguous(), key.contiguous(), weight, rotation.cos, rotation.sin, row_slots, key_slots, rows, keys,
            scales, tokens, rows.stride(0), rows.shape[1], keys.stride(0), keys.shape[1], scales.stride(0), eps,
            WIDTH=width, INDEX=index, ROPE=rotation.dim, RATIO=ratio, CODES=key_scale is not None,
            PLAIN_PAD=plain_pad, INDEX_PAD=index_pad, PAIR_PAD=pair_pad,
        )  # fmt: skip
