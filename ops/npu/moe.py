"""Routing and experts held by one rank: sort by expert, two grouped products, sort back."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from ..moe import moe_float, moe_w8a8, route, swiglu
from .linear import per_channel, to_nz

SQRT_SOFTPLUS = 2  # norm_type of the gating kernel
SUMS = 0  # of group lists: where the rows of each expert end, not how many they are


@route.register("npu")
def _route(
    logits: Tensor,
    bias: Tensor,
    topk: int,
    scaling: float,
    image_bias: Tensor | None = None,
    flags: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The kernel takes the other bias for a range of token ids: the flags are given for ids, 1 for the range."""
    if image_bias is not None and flags is None:
        flags = logits[:, -1].long()
    weights, ids, _ = torch.ops._C_ascend.moe_gating_top_k_hash(
        logits,
        topk,
        bias=bias,
        input_ids=None if image_bias is None else flags,
        routed_scaling_factor=scaling,
        eps=1e-20,
        group_select_mode=1,
        norm_type=SQRT_SOFTPLUS,
        bias_vl=image_bias,
        image_sentinel_lo=1,
        image_sentinel_count=1,
    )
    return weights, ids


@swiglu.register("npu")
def _swiglu(gate_up: Tensor, limit: float, weights: Tensor | None = None) -> Tensor:
    if weights is not None:
        return swiglu.implementations["reference"](gate_up, limit, weights)
    gate, up = gate_up.chunk(2, dim=-1)
    inner: Tensor = torch_npu.npu_swiglu(torch.cat((gate.clamp(max=limit), up.clamp(-limit, limit)), dim=-1))
    return inner


def _sorted(x: Tensor, ids: Tensor, first: int, experts: int, total: int, quantized: bool) -> tuple[Tensor, ...]:
    """-> rows [T k, H] by expert, where each choice went [T k], where the rows of each local expert end, scale of each
    row."""
    rows, index, ends, scale = torch_npu.npu_moe_init_routing_v2(
        x,
        ids.int(),
        active_num=ids.numel(),
        expert_num=total or experts,
        expert_tokens_num_type=SUMS,
        expert_tokens_num_flag=True,
        active_expert_range=[first, first + experts],
        quant_mode=1 if quantized else -1,
    )
    return rows, index, ends.long(), scale


def _combined(rows: Tensor, index: Tensor, weights: Tensor, whole: bool) -> Tensor:
    """Weighted sums of each token's rows, in FP32; choices that went to experts elsewhere (index -1) count nothing.

    Rows behind those of the local experts were never written: what stands there must not be NaN, times 0 or not.
    """
    if not whole:
        weights = torch.where((index >= 0).view_as(weights), weights, 0)
        rows, index = rows.nan_to_num(), index.clamp_min(0)
    summed: Tensor = torch_npu.npu_moe_token_unpermute(rows, index, probs=weights)
    return summed


def second_scale(scale: Tensor) -> Tensor:
    """Float32 [E, out, 1] -> [E, out], for ``second_product``: as BF16 where that loses nothing, as it is for what
    ``dsv41 quantize`` writes."""
    flat = per_channel(scale)
    narrow = flat.bfloat16()
    return narrow if torch.equal(narrow.float(), flat) else flat


def second_product(
    inner: Tensor, inner_scale: Tensor, w2: Tensor, w2_scale: Tensor, groups: Tensor, kind: int, dtype: torch.dtype
) -> Tensor:
    """Grouped INT8 product with both scales. CANN documents for A2 and A3: scales in BF16 give BF16, in FP32 FP16
    (which is finer, and wide enough for one expert's output); other pairs are for other chips (aclnnGroupedMatmulV4).
    """
    out_dtype = torch.float16 if w2_scale.dtype == torch.float32 and dtype == torch.bfloat16 else dtype
    (out,) = torch_npu.npu_grouped_matmul(
        [inner],
        [w2],
        scale=[w2_scale],
        per_token_scale=[inner_scale],
        group_list=groups,
        group_list_type=kind,
        split_item=2,
        group_type=0,
        output_dtype=out_dtype,
    )
    return out.to(dtype)  # type: ignore[no-any-return]


@moe_w8a8.register("npu", pack={1: to_nz, 2: per_channel, 3: to_nz, 4: second_scale})
def _moe_w8a8(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    weights: Tensor,
    ids: Tensor,
    limit: float,
    first: int = 0,
    total: int = 0,
) -> Tensor:
    """Weights packed: w13 [E, H, 2 I], w2 [E, I, H] FRACTAL_NZ; scales [E, 2 I] float32, [E, H] of ``second_scale``."""
    rows, index, ends, scale = _sorted(x, ids, first, len(w13), total, quantized=True)
    inner, inner_scale, _ = torch.ops._C_ascend.grouped_matmul_swiglu_quant_weight_nz(
        rows, w13, w13_scale, scale, ends, swiglu_limit=limit
    )
    out = second_product(inner, inner_scale, w2, w2_scale, ends, SUMS, x.dtype)
    return _combined(out, index, weights, total in (0, len(w13)))


def _transposed(weight: Tensor) -> Tensor:
    return weight.transpose(1, 2).contiguous()


@moe_float.register("npu", pack={1: _transposed, 2: _transposed})
def _moe_float(
    x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, limit: float, first: int = 0, total: int = 0
) -> Tensor:
    """Weights packed: w13 [E, H, 2 I], w2 [E, I, H], row-major."""
    rows, index, ends, _ = _sorted(x, ids, first, len(w13), total, quantized=False)
    groups = {"group_list": ends, "group_list_type": SUMS, "split_item": 2, "group_type": 0}
    (gate_up,) = torch_npu.npu_grouped_matmul([rows], [w13], **groups)
    (out,) = torch_npu.npu_grouped_matmul([swiglu(gate_up, limit)], [w2], **groups)
    return _combined(out, index, weights, total in (0, len(w13)))
