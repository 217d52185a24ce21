"""Choosing the compressed rows that attention reads."""

from __future__ import annotations

import torch
from torch import Tensor

from .cache import gather_rows, paged_slots
from .registry import operator

SCORE_ELEMENTS = 1 << 24  # bound on one chunk of per-head scores: 64 MiB in float32


@operator
def select_rows(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_table: Tensor,
    request: Tensor,
    visible: Tensor,
    topk: int,
    block_size: int = 0,
    publish_blocks: int = 0,
    candidates: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The ``topk`` best of the visible compressed rows by ``sum_h weights[h] relu(q[h] . key)``.

    q: [T, heads, d]; weights: [T, heads] float32; keys: index-key cache [blocks, per_block, d];
    block_table: [R, blocks] int32; request: [T] int64, ascending; visible: [T] int64, how many rows
    of its request a token may see. Returns selected [T, topk] int32, ascending, -1 padded at the end.

    Two-stage selection over blocks of ``block_size`` neighbouring rows: with ``publish_blocks`` the
    best that many blocks (by their best row; the newest block always among them) are returned
    as second value [T, publish_blocks] int32, ascending, -1 padded; with ``candidates`` of that form
    only rows of those blocks are considered. Ties go to the smallest position.
    Source: spec section 3.6.
    """
    selected = torch.full((len(q), topk), -1, dtype=torch.int32, device=q.device)
    published = torch.full((len(q), publish_blocks), -1, dtype=torch.int32, device=q.device)
    for t in range(len(q)):
        count = int(visible[t])
        if count == 0:
            continue
        slots = paged_slots(block_table, request[t], torch.arange(count, device=q.device), keys.shape[1])
        products = (q[t].float() @ gather_rows(keys, slots).float().T).relu()
        scores = (weights[t].float()[:, None] * products).sum(0)
        if publish_blocks:
            best = torch.stack([block.max() for block in scores.split(block_size)])
            best[-1] = torch.inf
            blocks = best.sort(descending=True, stable=True).indices[:publish_blocks].sort().values
            published[t, : len(blocks)] = blocks.int()
        if candidates is not None:
            block = torch.arange(count, device=q.device) // block_size
            scores = scores.masked_fill(~torch.isin(block, candidates[t].long()), -torch.inf)
        order = scores.sort(descending=True, stable=True).indices[:topk]
        rows = order[scores[order] > -torch.inf].sort().values
        selected[t, : len(rows)] = rows.int()
    return selected, published if publish_blocks else None


def _best(scores: Tensor, k: int) -> Tensor:
    """Mask of the k best of each row of [T, n], without -inf entries; ties go to the smallest index."""
    if scores.shape[1] <= k:
        return scores > -torch.inf
    threshold = scores.topk(k, dim=1, sorted=True).values[:, -1:]
    above, equal = scores > threshold, scores == threshold
    needed = k - above.sum(1, keepdim=True)
    return (above | (equal & (equal.cumsum(1) <= needed))) & (scores > -torch.inf)


def _pack(mask: Tensor, width: int) -> Tensor:
    """Indices of the set entries of each row of [T, n], ascending, -1 padded to [T, width] int32."""
    out = torch.full((len(mask), width), -1, dtype=torch.int32)
    row, column = mask.nonzero(as_tuple=True)
    out[row, (mask.cumsum(1) - 1)[row, column]] = column.int()
    return out


@select_rows.register("cpu")
def _select_rows_cpu(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_table: Tensor,
    request: Tensor,
    visible: Tensor,
    topk: int,
    block_size: int = 0,
    publish_blocks: int = 0,
    candidates: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    selected = torch.full((len(q), topk), -1, dtype=torch.int32)
    published = torch.full((len(q), publish_blocks), -1, dtype=torch.int32) if publish_blocks else None
    ids, counts = request.unique_consecutive(return_counts=True)
    start = 0
    for r, length in zip(ids.tolist(), counts.tolist(), strict=True):
        rows = int(visible[start : start + length].max())
        column = torch.arange(rows)
        # few rows: all are selected and all blocks are candidates, whatever their scores
        blocks_kept = publish_blocks or (topk if candidates is None else candidates.shape[1])
        needs_scores = rows > topk or rows > blocks_kept * max(block_size, 1)
        if needs_scores:
            matrix = gather_rows(keys, paged_slots(block_table, torch.tensor(r), column, keys.shape[1])).float().T
        step = max(1, SCORE_ELEMENTS // max(1, rows * q.shape[1])) if needs_scores else length
        for begin in range(start, start + length, step):
            part = slice(begin, min(begin + step, start + length))
            seen = column < visible[part, None]
            if needs_scores:
                products = (q[part].float().flatten(0, 1) @ matrix).relu_().unflatten(0, (-1, q.shape[1]))
                scores = torch.bmm(weights[part, None].float(), products).squeeze(1).masked_fill_(~seen, -torch.inf)
            else:
                scores = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
            if published is not None:
                blocks = -(-rows // block_size)
                padded = torch.nn.functional.pad(scores, (0, blocks * block_size - rows), value=-torch.inf)
                best = padded.unflatten(1, (blocks, block_size)).amax(-1)
                newest = ((visible[part] - 1) // block_size).clamp_min(0)[:, None]
                pinned = torch.where(visible[part] > 0, torch.inf, -torch.inf)[:, None]
                if blocks:
                    published[part] = _pack(_best(best.scatter(1, newest, pinned), publish_blocks), publish_blocks)
            if candidates is not None and needs_scores:
                allowed = torch.zeros(len(scores), -(-rows // block_size) + 1, dtype=torch.bool)
                allowed.scatter_(1, candidates[part].long().where(candidates[part] >= 0, allowed.shape[1] - 1), True)
                scores.masked_fill_(~allowed[:, :-1].repeat_interleave(block_size, 1)[:, :rows], -torch.inf)
            selected[part] = _pack(_best(scores, topk), topk)
        start += length
    return selected, published
