"""The lightning indexer with INT8 keys and queries (spec/peer-on-emulated-npu.md 7)."""

from __future__ import annotations

from typing import Any

import torch

from . import reference
from .attention import paged_rows


@reference
def npu_quant_lightning_indexer_v2_metadata(
    num_heads_q: int, num_heads_k: int, head_dim: int, topk: int, quant_mode: int, **options: Any
) -> torch.Tensor:
    """Tiling data of the kernel; its content means nothing here."""
    if quant_mode != 2 or options.get("mask_mode", 3) != 3:
        raise ValueError(
            f"npu_quant_lightning_indexer_v2_metadata: quant_mode {quant_mode}, mask_mode "
            f"{options.get('mask_mode', 3)}; expected 2, 3"
        )
    return torch.zeros(1024, dtype=torch.int32)


def scores(query: torch.Tensor, key: torch.Tensor, weight: torch.Tensor, key_scale: torch.Tensor) -> torch.Tensor:
    """query INT8 [n, H, D], key INT8 [K, D], weight FP16 [n, H] (index weight x query scale), key_scale FP16 [K] ->
    [n, K].

    As the kernel's golden: FP16(relu(INT32 / 1024)) times the FP16 weight, summed over heads in FP32, times the key's
    scale.
    """
    products = torch.einsum("nhd,kd->nhk", query.double(), key.double())  # exact: |sum| < 2^53
    activated = (products / 1024).clamp_min(0).half().float()
    return (weight.float()[..., None] * activated).sum(1) * key_scale.float()


@reference
def npu_quant_lightning_indexer_v3(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    query_dequant_scale: torch.Tensor,
    key_dequant_scale: torch.Tensor,
    topk: int,
    quant_mode: int,
    *,
    candidate_topk_index: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    cmp_residual_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    output_idx_offset: torch.Tensor | None = None,
    metadata: torch.Tensor | None = None,
    max_seqlen_q: int = -1,
    layout_q: str = "TND",
    layout_k: str = "PA_BBND",
    mask_mode: int = 3,
    cmp_ratio: int = 1,
    candidate_mode: int = 3,
    candidate_topk_blocks: int = 2048,
    candidate_block_size: int = 8,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> (rows int32 [T, 1, topk], nothing, candidate blocks int32 [T, 1, candidate_topk_blocks] in mode 1), padded
    with -1.

    candidate_mode 1 also returns the best blocks (the newest always among them); 2 scores only rows of the given
    blocks; 3 neither. Of equal scores the smaller row comes first (the kernel leaves that open).
    """
    rules = {
        "layout TND over PA_BBND": (layout_q, layout_k) == ("TND", "PA_BBND"),
        "mask_mode 3, quant_mode 2, metadata, no output offset": (mask_mode, quant_mode) == (3, 2)
        and metadata is not None
        and output_idx_offset is None,
        "INT8 query and key": query.dtype == key.dtype == torch.int8,
        "FP16 weights and scales": weights.dtype
        == query_dequant_scale.dtype
        == key_dequant_scale.dtype
        == torch.float16,
        "cmp_residual_k exactly for ratio 2": (cmp_residual_k is not None) == (cmp_ratio == 2),
        "candidate blocks exactly in mode 2": (candidate_topk_index is not None) == (candidate_mode == 2),
        "an int32 block table": block_table is not None and block_table.dtype == torch.int32,
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(f"npu_quant_lightning_indexer_v3: expected {rule}")
    assert cu_seqlens_q is not None
    assert seqused_k is not None
    assert block_table is not None
    tokens = query.shape[0]
    rows = torch.full((tokens, 1, topk), -1, dtype=torch.int32)
    blocks = torch.full((tokens, 1, candidate_topk_blocks) if candidate_mode == 1 else (0,), -1, dtype=torch.int32)
    starts = cu_seqlens_q.tolist()
    for request, used in enumerate(seqused_k.tolist()):
        begin, end = starts[request], min(starts[request + 1], tokens)
        n = starts[request + 1] - begin
        if n <= 0 or used <= 0 or end <= begin:
            continue
        positions = torch.arange(used)
        keys = paged_rows(key, block_table[request], positions)
        scales = paged_rows(key_dequant_scale.unflatten(-1, (-1,)), block_table[request], positions).reshape(used)
        weight = weights[begin:end] * query_dequant_scale[begin:end]  # FP16 product, as the kernel
        score = scores(query[begin:end], keys, weight, scales)
        residual = int(cmp_residual_k[request]) if cmp_residual_k is not None else 0
        position = used * cmp_ratio + residual - n + torch.arange(end - begin)
        limit = ((position + 1) // cmp_ratio).clamp(0, used)
        score = score.masked_fill(positions >= limit[:, None], float("-inf"))
        if candidate_mode == 1:
            blocks[begin:end, 0] = _best_blocks(score, limit, candidate_block_size, candidate_topk_blocks)
        if candidate_mode == 2:
            assert candidate_topk_index is not None
            score = _only_blocks(score, candidate_topk_index[begin:end, 0].long(), candidate_block_size)
        rows[begin:end, 0] = _best(score, topk)
    return rows, torch.zeros(0, dtype=torch.bfloat16), blocks


def _best(score: torch.Tensor, k: int) -> torch.Tensor:
    ordered, at = torch.sort(score, dim=-1, descending=True, stable=True)
    ordered, at = _padded(ordered, k, float("-inf")), _padded(at, k, -1)
    return torch.where(ordered > float("-inf"), at, -1).int()


def _best_blocks(score: torch.Tensor, limit: torch.Tensor, size: int, k: int) -> torch.Tensor:
    maxima = _padded(score, -(-score.shape[1] // size) * size, float("-inf")).unflatten(-1, (-1, size)).amax(-1)
    newest = ((limit - 1) // size).clamp_min(0)
    maxima = maxima.scatter(1, newest[:, None], float("inf")).masked_fill(limit[:, None] == 0, float("-inf"))
    return _best(maxima, k)


def _only_blocks(score: torch.Tensor, blocks: torch.Tensor, size: int) -> torch.Tensor:
    count = -(-score.shape[1] // size)
    given = (blocks >= 0) & (blocks < count)
    kept = torch.zeros(score.shape[0], count + 1, dtype=torch.bool).scatter(1, torch.where(given, blocks, count), True)[
        :, :count
    ]
    return score.masked_fill(~kept.repeat_interleave(size, 1)[:, : score.shape[1]], float("-inf"))


def _padded(x: torch.Tensor, width: int, value: float) -> torch.Tensor:
    return torch.nn.functional.pad(x[:, :width], (0, max(width - x.shape[1], 0)), value=value)
