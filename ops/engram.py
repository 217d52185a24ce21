"""Engram: n-gram hashes, table lookup and the gated addition to the streams."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .. import native
from ..native.threads import spread
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
def ngram_rows(
    ids: Tensor,
    token_map: Tensor,
    lookback: Tensor,
    query_start: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad: int,
) -> Tensor:
    """``hash_ngrams`` of every token of a step.

    ids: [T] token ids; token_map: [vocabulary] int64, compressed id of each, ``DEAD`` for images; lookback: [R or more,
    n - 1] integers, ids before each request's first token of this step, newest first, -1 where there is none;
    query_start: [R + 1] int32, first token of each request; the rest as ``hash_ngrams``. Tokens behind the last request
    get rows without meaning. Returns [layers, T, (n - 1) heads] int64.
    """
    ngrams = ngrams_of(ids, token_map, lookback, query_start)
    return hash_ngrams.implementations["reference"](ngrams, multipliers, primes, offsets, pad)


def ngrams_of(ids: Tensor, token_map: Tensor, lookback: Tensor, query_start: Tensor) -> Tensor:
    """Compressed ids [T, n] int64 of every token, its own and those before it, newest first."""
    own = token_map.index_select(0, ids)
    token, requests = torch.arange(len(ids), device=ids.device), len(query_start) - 1
    request = (query_start[1:-1, None] <= token).sum(0)
    before = lookback[:requests]
    known = token_map.index_select(0, before.clamp_min(0).flatten()).view(before.shape)
    # of each request: the ids before its first token, newest first; then of each token: its own and those before
    before = torch.where(before >= 0, known, DEAD).index_select(0, request)
    place = token - query_start.long().index_select(0, request)  # within this step
    ngrams = [own]
    for back in range(1, before.shape[1] + 1):
        older = before.gather(1, (back - 1 - place).clamp(0, before.shape[1] - 1)[:, None])[:, 0]
        ngrams.append(torch.where(place >= back, own.roll(back, 0), older))
    return torch.stack(ngrams, 1)


@ngram_rows.register("cpu")
def _ngram_rows_cpu(
    ids: Tensor,
    token_map: Tensor,
    lookback: Tensor,
    query_start: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad: int,
) -> Tensor:
    return hash_ngrams(ngrams_of(ids, token_map, lookback, query_start), multipliers, primes, offsets, pad)


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
def engram_lookup_mapped(
    addresses: Tensor, ids: Tensor, rows: int, chunk_rows: int, dim: int, groups: int, dtype: torch.dtype
) -> Tensor:
    """As ``engram_lookup``, from memory that is no tensor of the device: host memory registered for it.

    addresses: [chunks, 2] int64, where ``chunk_rows`` rows of codes lie and their scales, as the device of
    ``addresses`` sees them; ids [T, columns] int64; ``groups`` scales a row, 0 for a BF16 table -> [T, columns, dim]
    in ``dtype``.
    This reference reads host memory: it serves a device whose addresses are the host's.
    """
    result = torch.zeros(*ids.shape, dim, dtype=dtype, device=ids.device)
    for chunk, (codes_at, scale_at) in enumerate(addresses.tolist()):
        first = chunk * chunk_rows
        count = min(chunk_rows, rows - first)
        inside = (ids >= first) & (ids < first + count)
        codes = _at(codes_at, torch.int8 if groups else torch.bfloat16, count, dim)
        scale = _at(scale_at, torch.float32, count, groups) if groups else None
        result[inside] = engram_lookup.implementations["reference"](codes, scale, ids[inside] - first, dtype)
    return result


def _at(address: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """The host memory at an address, as a tensor."""
    count = shape[0] * shape[1]
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).view(shape)


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


# ---- cpu: the compiled look-up and hash ------------------------------------------------------------------------------

PARALLEL_FROM = 1 << 18  # values; less is done before a second thread has woken up


def _compiled(dim: int, groups: int, dtype: torch.dtype) -> bool:
    whole = groups > 0 and dim % groups == 0 and dim <= native.LOOKUP_BYTES
    return whole and dtype in (torch.float32, torch.bfloat16)


def _look_up(
    addresses: Tensor, ids: Tensor, rows: int, chunk_rows: int, dim: int, groups: int, dtype: torch.dtype
) -> Tensor:
    if addresses.dtype is not torch.int64 or ids.dtype is not torch.int64:
        raise ValueError(f"Engram look-up: addresses are {addresses.dtype}, ids {ids.dtype}; both must be int64")
    if list(addresses.shape) != [-(-rows // chunk_rows), 2]:
        raise ValueError(
            f"Engram look-up: addresses are {list(addresses.shape)} for {rows} rows in chunks of {chunk_rows}, "
            f"expected {[-(-rows // chunk_rows), 2]}"
        )
    result = torch.empty(*ids.shape, dim, dtype=dtype)
    flat, addresses, bf16 = ids.contiguous(), addresses.contiguous(), dtype is torch.bfloat16
    chunks, first_id, out, step = addresses.data_ptr(), flat.data_ptr(), result.data_ptr(), dim * dtype.itemsize

    def part(begin: int, end: int) -> None:
        at = first_id + begin * 8, out + begin * step, end - begin
        native.engram_rows_at(chunks, *at, rows, chunk_rows, dim, groups, bf16)

    spread(part, flat.numel(), torch.get_num_threads() if result.numel() >= PARALLEL_FROM else 1)
    return result


def _lookup_cpu(table: Tensor, scale: Tensor | None, ids: Tensor, dtype: torch.dtype) -> Tensor:
    if scale is None or not _compiled(table.shape[1], scale.shape[1], dtype) or not len(table):
        return engram_lookup.implementations["reference"](table, scale, ids, dtype)
    contiguous = table.is_contiguous() and scale.is_contiguous()
    if not contiguous or (table.dtype, scale.dtype) != (torch.int8, torch.float32):
        return engram_lookup.implementations["reference"](table, scale, ids, dtype)
    addresses = torch.tensor([[table.data_ptr(), scale.data_ptr()]])
    return _look_up(addresses, ids, len(table), len(table), table.shape[1], scale.shape[1], dtype)


def _lookup_mapped_cpu(
    addresses: Tensor, ids: Tensor, rows: int, chunk_rows: int, dim: int, groups: int, dtype: torch.dtype
) -> Tensor:
    if not _compiled(dim, groups, dtype):
        return engram_lookup_mapped.implementations["reference"](addresses, ids, rows, chunk_rows, dim, groups, dtype)
    return _look_up(addresses, ids, rows, chunk_rows, dim, groups, dtype)


def _hash_cpu(ngrams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad: int) -> Tensor:
    layers, orders, heads = primes.shape
    result = torch.empty(layers, len(ngrams), orders * heads, dtype=torch.int64)
    ngrams, multipliers, primes, offsets = (part.contiguous() for part in (ngrams, multipliers, primes, offsets))
    native.hash_ngrams(ngrams.numpy(), multipliers.numpy(), primes.numpy(), offsets.numpy(), pad, result.numpy())
    return result


if native.available:
    engram_lookup.register("cpu")(_lookup_cpu)
    engram_lookup_mapped.register("cpu")(_lookup_mapped_cpu)
    hash_ngrams.register("cpu")(_hash_cpu)
