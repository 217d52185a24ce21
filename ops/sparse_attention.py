"""Attention over a sliding window and selected compressed rows, keys equal to values."""

from __future__ import annotations

import torch
from torch import Tensor

from .cache import gather_rows, paged_slots
from .registry import operator

GATHERED_ELEMENTS = 1 << 23  # bound on the rows gathered at a time: 32 MiB in float32


@operator
def sparse_attention(
    q: Tensor,
    request: Tensor,
    positions: Tensor,
    window_cache: Tensor,
    window_table: Tensor,
    window: int,
    sink: Tensor,
    scale: float,
    compressed_cache: Tensor | None = None,
    compressed_table: Tensor | None = None,
    selected: Tensor | None = None,
) -> Tensor:
    """Softmax attention of every token over its own rows, with a sink in the denominator.

    q: [T, heads, d]; request, positions: [T] int64; window_cache: [blocks, per_block, d] with row
    ``position``; window_table: [R, blocks] int32; window: tokens seen, the query's own included;
    sink: [heads] float32, adds ``exp(sink)`` to the denominator and nothing to the sum;
    compressed_cache, compressed_table: the same for compressed rows, of which ``selected`` [T, k]
    int32 (-1 padded) are read. Returns [T, heads, d] in q's dtype, computed in float32.
    Source: spec section 3.3.
    """
    out = torch.empty_like(q)
    for t in range(len(q)):
        p = int(positions[t])
        span = torch.arange(max(0, p - window + 1), p + 1, device=q.device)
        slots = paged_slots(window_table, request[t], span, window_cache.shape[1])
        rows = gather_rows(window_cache, slots).float()
        if compressed_cache is not None and compressed_table is not None and selected is not None:
            chosen = selected[t][selected[t] >= 0].long()
            slots = paged_slots(compressed_table, request[t], chosen, compressed_cache.shape[1])
            rows = torch.cat((rows, gather_rows(compressed_cache, slots).float()))
        scores = q[t].float() @ rows.T * scale
        weights = torch.cat((scores, sink[:, None].float()), dim=1).softmax(1)[:, :-1]
        out[t] = (weights @ rows).to(q.dtype)
    return out


@sparse_attention.register("cpu")
def _sparse_attention_cpu(
    q: Tensor,
    request: Tensor,
    positions: Tensor,
    window_cache: Tensor,
    window_table: Tensor,
    window: int,
    sink: Tensor,
    scale: float,
    compressed_cache: Tensor | None = None,
    compressed_table: Tensor | None = None,
    selected: Tensor | None = None,
) -> Tensor:
    out = torch.empty_like(q)
    if not len(q):
        return out
    window = min(window, int(positions.max()) + 1)
    span = torch.arange(window) - (window - 1)
    chosen = None
    if compressed_cache is not None and compressed_table is not None and selected is not None:
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
        if chosen is not None and compressed_cache is not None and compressed_table is not None:
            slots = paged_slots(compressed_table, row_of, chosen[part], compressed_cache.shape[1])
            rows = torch.cat((rows, gather_rows(compressed_cache, slots)), dim=1)
            valid = torch.cat((valid, slots >= 0), dim=1)
        rows = rows.float()
        scores = torch.bmm(q[part].float(), rows.transpose(1, 2)).mul_(scale)
        scores.masked_fill_(~valid[:, None], -torch.inf)
        top = torch.maximum(scores.amax(-1, keepdim=True), sink[:, None])
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True).add_(torch.exp(sink[:, None] - top))
        out[part] = torch.bmm(weights, rows).div_(total).to(q.dtype)
    return out
