"""Latent rows on their way into paged caches: normalised, turned, stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cache import scatter_rows
from .indexer import quantize_index
from .norm import rms_norm
from .registry import REFERENCE, operator
from .rope import Rotation, apply_rope


def _places(slots: Tensor, per_block: int, ratio: int = 1) -> Tensor:
    """Block and row [T, 2] int32 of vLLM's slots [T], one row of a block for ``ratio`` tokens; negative: none."""
    block = torch.div(slots, per_block * ratio, rounding_mode="floor")
    row = torch.div(slots % (per_block * ratio), ratio, rounding_mode="floor")
    complete = slots % ratio == ratio - 1
    return torch.stack((torch.where(complete & (slots >= 0), block, -1), row), dim=1).int()


@operator
def store_latents(
    q: Tensor | None, kv: Tensor, weight: Tensor, eps: float, rotation: Rotation, cache: Tensor, slots: Tensor | None
) -> Tensor | None:
    """Store ``apply_rope(rms_norm(kv))`` and return ``apply_rope(q)``.

    q: [T, heads, d], may be overwritten, or None; kv: [T, d]; weight: [d] float32; cache: [blocks, per_block, d];
    slots: [T] integers, ``block * per_block + row`` of each token's row, negative for none; None: row t of block 0.
    In float32, with one rounding at the end. Source: spec section 3.3.
    """
    parts = (op.implementations[REFERENCE] for op in (rms_norm, apply_rope, scatter_rows))
    return _stored(q, kv, weight, eps, rotation, cache, slots, *parts)


def _stored(
    q: Tensor | None,
    kv: Tensor,
    weight: Tensor,
    eps: float,
    rotation: Rotation,
    cache: Tensor,
    slots: Tensor | None,
    normalise: Any,
    turn: Any,
    scatter: Any,
) -> Tensor | None:
    rows = turn(normalise(kv.float(), weight, eps), rotation).to(kv.dtype)
    slots = torch.arange(len(kv), device=kv.device) if slots is None else slots
    scatter(cache, rows, _places(slots, cache.shape[1]))
    return None if q is None else turn(q, rotation)


@store_latents.register("cpu")
def _store_latents_cpu(
    q: Tensor | None, kv: Tensor, weight: Tensor, eps: float, rotation: Rotation, cache: Tensor, slots: Tensor | None
) -> Tensor | None:
    return _stored(q, kv, weight, eps, rotation, cache, slots, rms_norm, apply_rope, scatter_rows)


@operator
def store_compressed(
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
    """Store ``apply_rope(latent)`` and, as index key, ``apply_rope(rms_norm(key))``, of tokens that end a group.

    latent: [T, d], key: [T, i]; weight: [i] float32; rows: [blocks, per_block, d]; keys: [blocks, per_block, i], int8
    with ``key_scale`` [blocks, per_block] float16, or float without; slots: [T] integers in blocks of ``per_block *
    ratio`` tokens, negative for none. In float32, with one rounding at the end. Source: spec sections 3.5, 3.6.
    """
    parts = (op.implementations[REFERENCE] for op in (rms_norm, apply_rope, scatter_rows, quantize_index))
    _stored_compressed(latent, key, weight, eps, rotation, rows, row_slots, keys, key_scale, key_slots, ratio, *parts)


def _stored_compressed(
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
    normalise: Any,
    turn: Any,
    scatter: Any,
    quantize: Any,
) -> None:
    scatter(rows, turn(latent, rotation), _places(row_slots, rows.shape[1], ratio))
    turned, places = turn(normalise(key.float(), weight, eps), rotation), _places(key_slots, keys.shape[1], ratio)
    if key_scale is None:
        scatter(keys, turned.to(key.dtype), places)
        return
    codes, scale = quantize(turned)
    scatter(keys, codes, places)
    scatter(key_scale[..., None], scale[:, None], places)


@store_compressed.register("cpu")
def _store_compressed_cpu(
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
    parts = (rms_norm, apply_rope, scatter_rows, quantize_index)
    _stored_compressed(latent, key, weight, eps, rotation, rows, row_slots, keys, key_scale, key_slots, ratio, *parts)
