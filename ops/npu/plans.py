"""What kernels work out once per step: how they divide its work among cores."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from ..batch import Batch


def make(batch: Batch, kind: str, *arguments: int) -> Tensor:
    """See ``ops.plan``: int32 [1024]."""
    return _attention(batch, *arguments) if kind == "attention" else _index(batch, *arguments)


def get(batch: Batch, kind: str, *arguments: int) -> Tensor:
    """That of this step, made now unless the metadata came with it."""
    key = (kind, *arguments)
    if key not in batch.plans:
        if torch_npu.npu.is_current_stream_capturing():
            raise RuntimeError(f"{key} was not planned with the step's metadata: a graph would replay this step's plan")
        batch.plans[key] = make(batch, kind, *arguments)
    return batch.plans[key]


def compressed(batch: Batch, ratio: int) -> tuple[Tensor, Tensor | None]:
    """Lengths of the compressed caches [R] int32, and the tokens behind them where groups have more than one."""
    groups, rest = batch.compressed(ratio)
    return groups, rest if ratio > 1 else None


def _attention(batch: Batch, heads: int, dim: int, window: int, ratio: int, selected: int) -> Tensor:
    groups, rest = compressed(batch, ratio) if ratio else (None, None)
    made: Tensor = torch.ops._C_ascend.npu_sparse_flash_mla_metadata(
        heads,
        1,
        dim,
        cu_seqlens_q=batch.query_start,
        seqused_ori_kv=batch.lengths,
        seqused_cmp_kv=groups,
        cmp_residual_kv=rest,
        batch_size=batch.requests,
        max_seqlen_q=batch.longest,
        max_seqlen_ori_kv=batch.furthest,
        max_seqlen_cmp_kv=batch.furthest // ratio if ratio else 0,
        cmp_topk=selected,
        cmp_ratio=ratio,
        ori_mask_mode=4,
        cmp_mask_mode=3 if ratio else 0,
        ori_win_left=window - 1,
        ori_win_right=0,
        layout_q="TND",
        layout_kv="PA_BBND",
        has_ori_kv=True,
        has_cmp_kv=ratio > 0,
    )
    return made


def _index(batch: Batch, heads: int, dim: int, selected: int, ratio: int) -> Tensor:
    groups, rest = compressed(batch, ratio)
    made: Tensor = torch.ops._C_ascend.npu_quant_lightning_indexer_v2_metadata(
        heads,
        1,
        dim,
        selected,
        2,
        cu_seqlens_q=batch.query_start,
        seqused_k=groups,
        cmp_residual_k=rest,
        batch_size=batch.requests,
        max_seqlen_q=batch.longest,
        max_seqlen_k=batch.furthest // ratio,
        layout_q="TND",
        layout_k="PA_BBND",
        mask_mode=3,
        cmp_ratio=ratio,
    )
    return made
