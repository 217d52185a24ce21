"""Choosing the compressed rows that attention reads."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from .batch import Batch
from .cache import gather_rows, paged_slots
from .registry import OperatorError, operator
from .w8a8 import INT8_MAX

KEYS = "DSV41_INDEX_KEYS"
SCORE_ELEMENTS = 1 << 24  # bound on one chunk of per-head scores: 64 MiB in float32


def int8_index_keys(device_type: str) -> bool:
    """Whether index keys are kept as INT8 with one FP16 scale each: what the NPU's indexer reads. ``DSV41_INDEX_KEYS``
    (``int8`` or ``model``, the model's dtype) chooses it elsewhere, to compare like with like. Raises OperatorError."""
    chosen = os.environ.get(KEYS)
    if chosen is None:
        return select_rows.selection(device_type) == "npu"
    if chosen not in ("int8", "model"):
        raise OperatorError(f"{KEYS}: {chosen!r}, expected int8 or model")
    if chosen == "model" and select_rows.selection(device_type) == "npu":
        raise OperatorError(f"{KEYS}: the NPU's indexer reads INT8 keys; set DSV41_OPS=select_rows=reference with it")
    return chosen == "int8"


@operator
def quantize_index(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., d] -> codes int8 [..., d], scale float16 [...]: absmax / 127 of each vector, kept in FP16.

    Codes are made with the float32 scale, as vllm-ascend 0.30.0rc2 makes those of keys (``models/deepseek_v41/
    indexer.py``); those of queries it makes with the rounded one, which moves codes at ties.
    """
    f = x.float()
    scale = f.abs().amax(-1, keepdim=True) / INT8_MAX
    codes = (f / scale.where(scale > 0, 1.0)).round().clamp(-INT8_MAX, INT8_MAX)
    return codes.to(torch.int8), scale.squeeze(-1).half()


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, key_scale: Tensor | None) -> Tensor:
    """q [n, heads, d], weights [n, heads], keys [k, d] -> [n, k] float32: ``sum_h weights[h] relu(q[h] . key)``.

    With ``key_scale`` [k] float16 the keys are INT8 and so becomes q: products are exact, divided by 1024 and kept
    in FP16 after the relu, as are weight times query scale; then float32. (A factor of 1024 changes no order.)
    Source: ``npu_quant_lightning_indexer``, developer guide deepseek_v41_qli_candidate of vllm-ascend.
    """
    if key_scale is None:
        products = (q.float().flatten(0, 1) @ keys.float().T).relu_().unflatten(0, (-1, q.shape[1]))
        return torch.bmm(weights[:, None].float(), products).squeeze(1)
    codes, scale = quantize_index.implementations["reference"](q)
    # float32 products of INT8 are exact up to 2 ** 24: 1040 products of 127 * 127
    products = codes.float().flatten(0, 1) @ keys.float().T
    products = (products / 1024).relu_().half().float().unflatten(0, (-1, q.shape[1]))
    weight = weights.half() * scale
    return torch.bmm(weight[:, None].float(), products).squeeze(1) * key_scale.float()


def underflows(q: Tensor, weights: Tensor) -> int:
    """How many products of index weight and query scale FP16 turns into 0: heads that stop counting, unnoticed."""
    scale = quantize_index.implementations["reference"](q)[1]
    weight = weights.half() * scale
    return int(((weight == 0) & (weights != 0) & (q.float().abs().amax(-1) != 0)).sum())


@operator
def select_rows(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scale: Tensor | None,
    batch: Batch,
    block_table: Tensor,
    topk: int,
    ratio: int,
    block_size: int = 0,
    publish_blocks: int = 0,
    candidates: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The ``topk`` best of the visible compressed rows by ``index_scores``.

    q: [T, heads, d]; weights: [T, heads] float32; keys: index-key cache [blocks, per_block, d] of rows of ``ratio``
    tokens, float, or int8 with ``key_scale`` [blocks, per_block] float16; block_table: [R, blocks] int32. A token sees
    the rows that are complete with it. Returns selected [T, topk] int32, -1 padded at the end, ascending (but in any
    order where a kernel leaves it open).

    Two-stage selection over blocks of ``block_size`` neighbouring rows: with ``publish_blocks`` the
    best that many blocks (by their best row; the newest block always among them) are returned
    as second value [T, publish_blocks] int32, -1 padded; with ``candidates`` of that form
    only rows of those blocks are considered. Ties go to the smallest position.
    Source: spec section 3.6.
    """
    selected = torch.full((len(q), topk), -1, dtype=torch.int32, device=q.device)
    published = torch.full((len(q), publish_blocks), -1, dtype=torch.int32, device=q.device)
    for t in range(len(q)):
        count = (int(batch.positions[t]) + 1) // ratio
        if count <= 0:
            continue
        slots = paged_slots(block_table, batch.request[t], torch.arange(count, device=q.device), keys.shape[1])
        scale = None if key_scale is None else gather_rows(key_scale[..., None], slots)[:, 0]
        scores = index_scores(q[t : t + 1], weights[t : t + 1], gather_rows(keys, slots), scale)[0]
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
    key_scale: Tensor | None,
    batch: Batch,
    block_table: Tensor,
    topk: int,
    ratio: int,
    block_size: int = 0,
    publish_blocks: int = 0,
    candidates: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    selected = torch.full((len(q), topk), -1, dtype=torch.int32)
    published = torch.full((len(q), publish_blocks), -1, dtype=torch.int32) if publish_blocks else None
    visible = (batch.positions + 1).clamp_min(0) // ratio
    ids, counts = batch.request.unique_consecutive(return_counts=True)
    start = 0
    for r, length in zip(ids.tolist(), counts.tolist(), strict=True):
        rows = int(visible[start : start + length].max())
        column = torch.arange(rows)
        # few rows: all are selected and all blocks are candidates, whatever their scores
        blocks_kept = publish_blocks or (topk if candidates is None else candidates.shape[1])
        needs_scores = rows > topk or rows > blocks_kept * max(block_size, 1)
        if needs_scores:
            slots = paged_slots(block_table, torch.tensor(r), column, keys.shape[1])
            matrix = gather_rows(keys, slots)
            scale = None if key_scale is None else gather_rows(key_scale[..., None], slots)[:, 0]
        step = max(1, SCORE_ELEMENTS // max(1, rows * q.shape[1])) if needs_scores else length
        for begin in range(start, start + length, step):
            part = slice(begin, min(begin + step, start + length))
            seen = column < visible[part, None]
            if needs_scores:
                scores = index_scores(q[part], weights[part], matrix, scale).masked_fill_(~seen, -torch.inf)
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
