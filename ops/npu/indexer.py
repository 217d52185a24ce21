"""``npu_quant_lightning_indexer``: INT8 keys and queries, FP16 scales."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from ..batch import Batch
from ..indexer import quantize_index, select_rows
from . import plans

PUBLISHES, CONSUMES, ONE_STAGE = 1, 2, 3  # candidate modes


@quantize_index.register("npu")
def _quantize_index(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = torch_npu.npu_dynamic_quant(x)
    return codes, scale.half()


@select_rows.register("npu")
def _select_rows(
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
    """Rows come in the kernel's order, which the attention kernel does not mind."""
    if key_scale is None:
        raise TypeError("the NPU's indexer reads INT8 index keys; the cache holds float ones (DSV41_INDEX_KEYS=model)")
    codes, scale = quantize_index(q)
    groups, rest = plans.compressed(batch, ratio)
    mode = PUBLISHES if publish_blocks else CONSUMES if candidates is not None else ONE_STAGE
    width = publish_blocks or (candidates.shape[1] if candidates is not None else 0)
    rows, _, blocks = torch.ops._C_ascend.npu_quant_lightning_indexer_v3(
        codes,
        keys[:, :, None],
        weights.half(),
        scale,
        key_scale[..., None],
        topk,
        2,
        candidate_topk_index=None if candidates is None else candidates[:, None],
        cu_seqlens_q=batch.query_start,
        seqused_k=groups,
        cmp_residual_k=rest,
        block_table=block_table,
        metadata=plans.get(batch, "index", q.shape[1], q.shape[2], topk, ratio),
        max_seqlen_q=batch.longest,
        layout_q="TND",
        layout_k="PA_BBND",
        mask_mode=3,
        cmp_ratio=ratio,
        candidate_mode=mode,
        **({"candidate_topk_blocks": width, "candidate_block_size": block_size} if width else {}),
    )
    return rows[:, 0], blocks[:, 0] if publish_blocks else None
