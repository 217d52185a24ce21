"""Sparse multi-head latent attention over a paged cache (csrc/attention of vllm-ascend;
spec/peer-on-emulated-npu.md 7).
"""

from __future__ import annotations

from typing import Any

import torch

from . import reference


def paged_rows(cache: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """cache [blocks, rows, 1, ..], table int32 [n] of one request, positions [..] -> cache rows [.., ..]."""
    rows = cache.shape[1]
    return cache[table[positions // rows].long(), positions % rows, 0]


@reference
def npu_sparse_flash_mla_metadata(num_heads_q: int, num_heads_kv: int, head_dim: int, **options: Any) -> torch.Tensor:
    """Tiling data of the kernel; its content means nothing here."""
    if options.get("layout_q", "BSND") != "TND" or options.get("layout_kv", "BSND") != "PA_BBND":
        raise ValueError(
            f"npu_sparse_flash_mla_metadata: layouts {options.get('layout_q')}, {options.get('layout_kv')}; "
            f"expected TND, PA_BBND"
        )
    if options.get("ori_topk", 0) and min(options.get("ori_win_left", -1), options.get("ori_win_right", -1)) < 0:
        raise ValueError("npu_sparse_flash_mla_metadata: listed positions need ori_win_left, ori_win_right >= 0")
    return torch.zeros(1024, dtype=torch.int32)


def _check(o: dict[str, Any]) -> None:
    """Combinations that the host code of the operator documents."""
    ratio = o["cmp_ratio"]
    rules = {
        "layout TND over PA_BBND": o["layout_q"] == "TND" and o["layout_kv"] == "PA_BBND",
        "metadata given": o["metadata"] is not None,
        "no log-sum-exp": not o["return_softmax_lse"],
        "cmp_ratio 0, 1 or 2, and 0 exactly without a compressed cache": ratio in (0, 1, 2)
        and (ratio == 0) == (o["cmp_kv"] is None),
        "cmp_mask_mode 3 with a compressed cache": ratio == 0 or o["cmp_mask_mode"] == 3,
        "cmp_residual_kv exactly for ratio 2": (o["cmp_residual_kv"] is not None) == (ratio == 2),
        "a window (mask mode 4) or indices (mask mode 0, no compressed cache)": o["ori_mask_mode"] == 4
        if o["ori_sparse_indices"] is None
        else o["ori_mask_mode"] == 0 and o["cmp_kv"] is None,
        # op_host/sparse_flash_mla_tiling.cpp, A2 and A3: also where positions are listed
        "ori_win_left and ori_win_right not negative": o["ori_win_left"] >= 0 and o["ori_win_right"] >= 0,
        "int32 tables and lengths": all(
            o[k] is None or o[k].dtype == torch.int32
            for k in (
                "ori_block_table",
                "cmp_block_table",
                "cu_seqlens_q",
                "seqused_ori_kv",
                "seqused_cmp_kv",
                "cmp_residual_kv",
                "ori_sparse_indices",
                "cmp_sparse_indices",
                "ori_topk_length",
                "metadata",
            )
        ),
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(f"npu_sparse_flash_mla: expected {rule}")


@reference
def npu_sparse_flash_mla(q: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, N, D] BF16 -> [T, N, D]; key = value = cache row. One softmax over the window (or the listed positions) and
    the listed compressed rows; the sink is a further logit without value. Probabilities stay FP32 (a kernel rounds
    them).

    Row i of a request with n queries and L cached positions is at position p = L - n + i. It sees positions
    max(p - ori_win_left, 0) .. p + ori_win_right, or ori_sparse_indices[:ori_topk_length] as they stand, and those
    cmp_sparse_indices that are below clamp((p' + 1) // ratio), where p' counts from seqused_cmp_kv * ratio + residual.
    """
    defaults: dict[str, Any] = dict.fromkeys(
        (
            "ori_kv",
            "cmp_kv",
            "ori_sparse_indices",
            "cmp_sparse_indices",
            "ori_block_table",
            "cmp_block_table",
            "cu_seqlens_q",
            "cu_seqlens_ori_kv",
            "cu_seqlens_cmp_kv",
            "seqused_q",
            "seqused_ori_kv",
            "seqused_cmp_kv",
            "cmp_residual_kv",
            "ori_topk_length",
            "cmp_topk_length",
            "sinks",
            "metadata",
        )
    )
    o: dict[str, Any] = (
        defaults
        | {
            "softmax_scale": 1.0,
            "cmp_ratio": 0,
            "ori_mask_mode": 0,
            "cmp_mask_mode": 0,
            "ori_win_left": -1,
            "ori_win_right": -1,
            "layout_q": "BSND",
            "layout_kv": "BSND",
            "topk_value_mode": 1,
            "return_softmax_lse": False,
        }
        | options
    )
    _check(o)
    out = torch.zeros_like(q)
    starts, lengths = o["cu_seqlens_q"].tolist(), o["seqused_ori_kv"].tolist()
    for request, length in enumerate(lengths):
        begin, end = starts[request], min(starts[request + 1], q.shape[0])
        n = starts[request + 1] - begin
        if n <= 0 or length <= 0 or end <= begin:
            continue
        rows = torch.arange(begin, end)
        keys, visible = _window(o, request, rows, length - n + rows - begin, length)
        if o["cmp_kv"] is not None:
            more, seen = _compressed(o, request, rows, n, rows - begin)
            keys, visible = torch.cat([keys, more], 1), torch.cat([visible, seen], 1)
        out[begin:end] = _attend(q[begin:end], keys, visible, o["sinks"], o["softmax_scale"])
    return out, torch.zeros(0, dtype=torch.float32)


def _window(
    o: dict[str, Any], request: int, rows: torch.Tensor, positions: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if o["ori_sparse_indices"] is not None:
        listed = o["ori_sparse_indices"][rows, 0].long()
        counts = o["ori_topk_length"][rows, 0].long()
        visible = (torch.arange(listed.shape[1]) < counts[:, None]) & (listed >= 0)
        if bool((listed[visible] >= length).any()):
            raise ValueError(f"npu_sparse_flash_mla: a listed position is beyond the {length} cached ones")
    else:
        listed = positions[:, None] + torch.arange(-o["ori_win_left"], o["ori_win_right"] + 1)
        visible = (listed >= 0) & (listed < length)
    return paged_rows(o["ori_kv"], o["ori_block_table"][request], torch.where(visible, listed, 0)), visible


def _compressed(
    o: dict[str, Any], request: int, rows: torch.Tensor, n: int, at: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    ratio, used = o["cmp_ratio"], int(o["seqused_cmp_kv"][request])
    residual = int(o["cmp_residual_kv"][request]) if ratio == 2 else 0
    position = used * ratio + residual - n + at
    limit = ((position + 1) // ratio).clamp(0, used)
    listed = o["cmp_sparse_indices"][rows, 0].long()
    visible = (listed >= 0) & (listed < limit[:, None])
    return paged_rows(o["cmp_kv"], o["cmp_block_table"][request], torch.where(visible, listed, 0)), visible


def _attend(
    q: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, sinks: torch.Tensor, scale: float
) -> torch.Tensor:
    """q [n, N, D], keys [n, K, D], visible [n, K], sinks [N] -> [n, N, D]; nothing visible gives 0."""
    values = keys.float().masked_fill(~visible[..., None], 0)
    logits = torch.einsum("nhd,nkd->nhk", q.float(), values) * scale
    logits = logits.masked_fill(~visible[:, None], float("-inf"))
    sink = sinks.float()[None, :, None].expand(q.shape[0], -1, 1)
    weights = torch.softmax(torch.cat([sink, logits], -1), -1)[..., 1:]
    return torch.einsum("nhk,nkd->nhd", weights, values).to(q.dtype)
