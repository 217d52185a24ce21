"""Attention over a sliding window and selected compressed rows, keys equal to values."""

from __future__ import annotations

import torch
from torch import Tensor

from .batch import Batch, Blocks
from .cache import gather_rows, paged_slots
from .registry import operator

GATHERED_ELEMENTS = 1 << 23  # bound on the rows gathered at a time: 32 MiB in float32


def _attend(q: Tensor, rows: Tensor, sink: Tensor, scale: float) -> Tensor:
    """q [heads, d] over rows [n, d], keys and values in one: float32 softmax with a sink in the denominator."""
    scores = q.float() @ rows.T * scale
    weights = torch.cat((scores, sink[:, None].float()), dim=1).softmax(1)[:, :-1]
    return (weights @ rows).to(q.dtype)


@operator
def sparse_attention(
    q: Tensor,
    batch: Batch,
    window_cache: Tensor,
    window_table: Tensor,
    window: int,
    sink: Tensor,
    scale: float,
    compressed_cache: Tensor | None = None,
    compressed_table: Tensor | None = None,
    selected: Tensor | None = None,
    ratio: int = 0,
) -> Tensor:
    """Softmax attention of every token over its own rows, with a sink in the denominator.

    q: [T, heads, d]; window_cache: [blocks, per_block, d] with row ``position``; window_table: [R, blocks] int32;
    window: tokens seen, the query's own included; sink: [heads] float32, adds ``exp(sink)`` to the denominator and
    nothing to the sum; compressed_cache, compressed_table: the same for rows of ``ratio`` tokens each, of which
    ``selected`` [T, k] int32 (-1 padded) are read. Returns [T, heads, d] in q's dtype, computed in float32; what
    padding gets is of no use. Source: spec section 3.3.
    """
    out = torch.zeros_like(q)
    for t in range(len(q)):
        p, request = int(batch.positions[t]), batch.request[t]
        if p < 0:
            continue
        span = torch.arange(max(0, p - window + 1), p + 1, device=q.device)
        rows = gather_rows(window_cache, paged_slots(window_table, request, span, window_cache.shape[1])).float()
        if compressed_cache is not None and compressed_table is not None and selected is not None:
            chosen = selected[t][selected[t] >= 0].long()
            slots = paged_slots(compressed_table, request, chosen, compressed_cache.shape[1])
            rows = torch.cat((rows, gather_rows(compressed_cache, slots).float()))
        out[t] = _attend(q[t], rows, sink, scale)
    return out


@sparse_attention.register("cpu")
def _sparse_attention_cpu(
    q: Tensor,
    batch: Batch,
    window_cache: Tensor,
    window_table: Tensor,
    window: int,
    sink: Tensor,
    scale: float,
    compressed_cache: Tensor | None = None,
    compressed_table: Tensor | None = None,
    selected: Tensor | None = None,
    ratio: int = 0,
) -> Tensor:
    del ratio
    chosen = (compressed_cache, compressed_table, selected) if selected is not None else None
    return _attend_many(q, batch.request, batch.positions, window_cache, window_table, window, sink, scale, chosen)


@operator
def block_attention(
    q: Tensor,
    rows: Tensor,
    blocks: Blocks,
    window_cache: Tensor,
    window_table: Tensor,
    window: int,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """Attention of drafted blocks: every token sees the window up to ``blocks.last`` and all rows of its own block,
    later ones too, which are stored nowhere.

    q: [R K, heads, d]; rows: [R K, d]; the others as in ``sparse_attention``. Source: spec section 3.10.
    """
    out = torch.empty_like(q)
    for t in range(len(q)):
        request, last = t // blocks.size, int(blocks.last[t // blocks.size])
        span = torch.arange(max(0, last - window + 1), last + 1, device=q.device)
        slots = paged_slots(window_table, torch.tensor(request), span, window_cache.shape[1])
        own = rows[request * blocks.size : (request + 1) * blocks.size]
        out[t] = _attend(q[t], torch.cat((gather_rows(window_cache, slots), own)).float(), sink, scale)
    return out


@block_attention.register("cpu")
def _block_attention_cpu(
    q: Tensor,
    rows: Tensor,
    blocks: Blocks,
    window_cache: Tensor,
    window_table: Tensor,
    window: int,
    sink: Tensor,
    scale: float,
) -> Tensor:
    requests, size = len(blocks.last), blocks.size
    # the block takes the place of compressed rows: one cache block per request, all of it selected
    table = torch.arange(requests, dtype=torch.int32)[:, None]
    every = torch.arange(size, dtype=torch.int32).expand(len(q), size)
    chosen = rows.view(requests, size, -1), table, every
    seen = blocks.last.repeat_interleave(size)
    return _attend_many(q, blocks.request, seen, window_cache, window_table, window, sink, scale, chosen)


def _attend_many(
    q: Tensor,
    request: Tensor,
    positions: Tensor,
    window_cache: Tensor,
    window_table: Tensor,
    window: int,
    sink: Tensor,
    scale: float,
    compressed: tuple[Tensor | None, Tensor | None, Tensor] | None,
) -> Tensor:
    """Windows that end at ``positions`` [T], and of the compressed cache, by its table, the selected rows."""
    out = torch.empty_like(q)
    if not len(q):
        return out
    window = min(window, int(positions.max()) + 1)
    span = torch.arange(window) - (window - 1)
    chosen, cache, table = None, None, None
    if compressed is not None:
        cache, table, selected = compressed
        # selections are packed to the left: columns that nobody uses are not gathered
        chosen = selected[:, : int((selected >= 0).sum(1).max())].long()
    width = window + (chosen.shape[1] if chosen is not None else 0)
    step = max(1, GATHERED_ELEMENTS // (width * q.shape[2]))
    for begin in range(0, len(q), step):
        part = slice(begin, begin + step)
        row_of = request[part, None]
        slots = paged_slots(window_table, row_of, positions[part, None] + span, window_cache.shape[1])
        rows = gather_rows(window_cache, slots)
        valid = slots >= 0
        if chosen is not None and cache is not None and table is not None:
            slots = paged_slots(table, row_of, chosen[part], cache.shape[1])
            rows = torch.cat((rows, gather_rows(cache, slots)), dim=1)
            valid = torch.cat((valid, slots >= 0), dim=1)
        rows = rows.float()
        scores = torch.bmm(q[part].float(), rows.transpose(1, 2)).mul_(scale)
        scores.masked_fill_(~valid[:, None], -torch.inf)
        top = torch.maximum(scores.amax(-1, keepdim=True), sink[:, None])
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True).add_(torch.exp(sink[:, None] - top))
        out[part] = torch.bmm(weights, rows).div_(total).to(q.dtype)
    return out
