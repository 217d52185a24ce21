"""``npu_sparse_flash_mla``: a window and selected rows, with sinks; and drafted blocks by listed positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..batch import Batch, Blocks
from ..sparse_attention import block_attention, sparse_attention
from . import plans

WINDOW, LISTED = 4, 0  # mask modes
LIST_WIDTH = 128  # lists of positions are as wide as a multiple of this, as vllm-ascend's are


@sparse_attention.register("npu")
def _sparse_attention(
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
    more: dict[str, Any] = {}
    rows = 0
    if compressed_cache is not None and selected is not None:
        rows = selected.shape[1]
        groups, rest = plans.compressed(batch, ratio)
        more = {
            "cmp_kv": compressed_cache[:, :, None],
            "cmp_block_table": compressed_table,
            "cmp_sparse_indices": selected[:, None],
            "seqused_cmp_kv": groups,
            "cmp_residual_kv": rest,
            "cmp_mask_mode": 3,
        }
    out: Tensor = torch.ops._C_ascend.npu_sparse_flash_mla(
        q,
        ori_kv=window_cache[:, :, None],
        ori_block_table=window_table,
        cu_seqlens_q=batch.query_start,
        seqused_ori_kv=batch.lengths,
        sinks=sink,
        metadata=plans.get(batch, "attention", q.shape[1], q.shape[2], window, ratio if more else 0, rows),
        softmax_scale=scale,
        cmp_ratio=ratio if more else 0,
        ori_mask_mode=WINDOW,
        ori_win_left=window - 1,
        ori_win_right=0,
        layout_q="TND",
        layout_kv="PA_BBND",
        **more,
    )[0]
    return out


@block_attention.register("npu")
def _block_attention(
    q: Tensor,
    rows: Tensor,
    blocks: Blocks,
    window_cache: Tensor,
    window_table: Tensor,
    window: int,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """The kernel reads one paged cache: the blocks that the window touches are copied in front of the drafted rows."""
    per_block, requests = window_cache.shape[1], len(blocks.last)
    key = ("npu", window, per_block, q.shape[1:])
    if key not in blocks.derived:
        blocks.derived[key] = _Listed(blocks, window, per_block, q.shape[1], q.shape[2], q.device)
    listed: Any = blocks.derived[key]
    touched = window_table.gather(1, listed.columns.long()).flatten()
    pages = window_cache.new_zeros(requests, listed.pages, per_block, q.shape[2])
    pages[:, : listed.touched] = window_cache.index_select(0, touched).view(requests, listed.touched, per_block, -1)
    behind = pages[:, listed.touched :].view(requests, -1, q.shape[2])
    behind[:, : blocks.size] = rows.view(requests, blocks.size, -1)
    out: Tensor = torch.ops._C_ascend.npu_sparse_flash_mla(
        q,
        ori_kv=pages.view(-1, per_block, 1, q.shape[2]),
        ori_block_table=listed.table,
        ori_sparse_indices=listed.positions,
        ori_topk_length=listed.counts,
        cu_seqlens_q=listed.query_start,
        seqused_ori_kv=listed.lengths,
        sinks=sink,
        metadata=listed.plan,
        softmax_scale=scale,
        cmp_ratio=0,
        ori_mask_mode=LISTED,
        ori_win_left=window - 1,  # not used with listed positions, and refused when absent
        ori_win_right=0,
        layout_q="TND",
        layout_kv="PA_BBND",
    )[0]
    return out


class _Listed:
    """Where the rows of a draft step lie: the same for all stages, so worked out once, on the host."""

    def __init__(self, blocks: Blocks, window: int, per_block: int, heads: int, dim: int, device: torch.device) -> None:
        last, size = blocks.last, blocks.size
        requests = len(last)
        self.touched = (window - 2) // per_block + 2 if window > 1 else 1  # blocks that a window of rows may lie in
        self.pages = self.touched + -(-size // per_block)
        begin = (last - (window - 1)).clamp_min(0)
        first = torch.div(begin, per_block, rounding_mode="floor")
        newest = torch.div(last, per_block, rounding_mode="floor")
        column = first[:, None] + torch.arange(self.touched)
        count = last - begin + 1
        width = -(-(window + size) // LIST_WIDTH) * LIST_WIDTH
        place = torch.arange(width)
        stored = (begin - first * per_block)[:, None] + place
        drafted = self.touched * per_block + place - count[:, None]
        position = torch.where(place < count[:, None], stored, drafted)
        position = torch.where(place < count[:, None] + size, position, -1)
        parts = _sent(
            device,
            torch.minimum(column, newest[:, None]),  # those behind the newest are not listed
            torch.arange(requests * self.pages).view(requests, -1),
            torch.arange(0, requests * size + 1, size),
            torch.full((requests,), self.touched * per_block + size),
            position.repeat_interleave(size, 0)[:, None],
            (count + size).repeat_interleave(size)[:, None],
        )
        self.columns, self.table, self.query_start, self.lengths, self.positions, self.counts = parts
        self.plan = torch.ops._C_ascend.npu_sparse_flash_mla_metadata(
            heads,
            1,
            dim,
            cu_seqlens_q=self.query_start,
            seqused_ori_kv=self.lengths,
            batch_size=requests,
            max_seqlen_q=size,
            max_seqlen_ori_kv=self.touched * per_block + size,
            ori_topk=width,
            ori_topk_length=self.counts,
            ori_mask_mode=LISTED,
            ori_win_left=window - 1,
            ori_win_right=0,
            layout_q="TND",
            layout_kv="PA_BBND",
            has_ori_kv=True,
            has_cmp_kv=False,
        )


def _sent(device: torch.device, *parts: Tensor) -> list[Tensor]:
    """Integers from the host as int32, in one transfer; each begins at a multiple of 64 bytes."""
    room = [-(-part.numel() // 16) * 16 for part in parts]
    staged = torch.zeros(sum(room), dtype=torch.int32)
    for part, place in zip(parts, staged.split(room), strict=True):
        place[: part.numel()] = part.flatten()
    arrived = staged.to(device).split(room)
    return [place[: part.numel()].view(part.shape) for part, place in zip(parts, arrived, strict=True)]
