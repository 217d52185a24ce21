"""Engram: n-gram hashes, table lookup and the gated addition to the streams."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import operator

DEAD = -1  # compressed id of a token that hides itself and everything before it


@operator
def hash_ngrams(ngrams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad: int) -> Tensor:
    """Table rows of every token for every Engram layer.

    ngrams: [T, n] int64 compressed ids, newest first, ``DEAD`` for images and for what lies before the
    text; multipliers: [layers, n] int64; primes: [layers, n - 1, heads]; offsets: [layers,
    (n - 1) heads]; pad: compressed id that stands for a dead token and for all older ones.
    Returns [layers, T, (n - 1) heads] int64. Source: spec section 3.9 (64-bit wrap-around products).
    """
    blocked = (ngrams == DEAD).cumsum(1) > 0
    products = ngrams.masked_fill(blocked, pad) * multipliers[:, None]
    columns = []
    rolling = products[..., 0]
    for back in range(1, ngrams.shape[1]):
        rolling = rolling ^ products[..., back]
        columns.append(rolling[..., None] % primes[:, None, back - 1])
    return torch.cat(columns, dim=-1) + offsets[:, None]


@operator
def engram_lookup(table: Tensor, scale: Tensor | None, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a table: table [rows, dim] int8 or float; scale [rows, dim / group] float32 or None;
    ids [T, columns] int64, zeros for an id outside the table -> [T, columns, dim] in ``dtype``."""
    inside = (ids >= 0) & (ids < len(table))
    safe = ids.where(inside, 0).flatten()
    rows = table.index_select(0, safe).float()
    if scale is not None:
        group = table.shape[1] // scale.shape[1]
        rows = (rows.unflatten(1, (-1, group)) * scale.index_select(0, safe)[..., None]).flatten(1)
    rows = rows.masked_fill_(~inside.flatten()[:, None], 0.0)
    return rows.to(dtype).view(*ids.shape, table.shape[1])


@operator
def engram_inject(
    streams: Tensor, kv: Tensor, qk_weight: Tensor, dead: Tensor, eps: float, rotation: Tensor | None = None
) -> Tensor:
    """Add the value to every stream, gated by how well the stream matches its key.

    streams: [T, hc, D]; kv: [T, (hc + 1) D], one key per stream, then the value; qk_weight:
    [hc, D] float32, ``q_weight * k_weight``; dead: [T] bool, tokens that take nothing; rotation: [b, b]
    float32, the block of the orthogonal matrix by which streams and value are rotated, and keys are not.
    Returns the streams' shape and dtype. Source: spec sections 3.9 (gate), 5.4 (rotation).
    """
    hc, dim = streams.shape[1:]
    x, key = streams.float(), kv[:, : hc * dim].unflatten(1, (hc, dim)).float()
    query = x if rotation is None else (x.unflatten(-1, (-1, len(rotation))) @ rotation.T).flatten(-2)
    dot = (query * qk_weight * key).sum(-1)
    dot = dot * torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps) * dim**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    gate = gate.masked_fill(dead[:, None], 0.0)
    return torch.addcmul(x, gate[..., None], kv[:, None, hc * dim :].float()).to(streams.dtype)
