"""Routing and INT8 experts."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu, softplus

from . import reference


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, N] float -> (INT8, scale FP32 [T]): absmax / 127 per row, ties to even."""
    scale = x.abs().amax(-1) / 127
    return torch.round(x / scale.clamp_min(1e-30)[..., None]).clamp(-128, 127).to(torch.int8), scale


def clamped_swiglu(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """[.., 2 N] -> silu(gate) * up; limit > 0 cuts the gate from above and up on both sides."""
    gate, up = gate_up.chunk(2, -1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return silu(gate) * up


@reference
def moe_gating_top_k_hash(
    x: torch.Tensor,
    k: int,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    bias_vl: torch.Tensor | None = None,
    image_sentinel_lo: int = 129257,
    image_sentinel_count: int = 5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, E] logits -> (weights [T, k], experts int32 [T, k], scores [T, E]).

    Selection adds the bias (bias_vl for image tokens); weights are the scores without bias, over their sum.
    """
    if group_count != 1 or (tid2eid is not None and bias_vl is None):
        raise ValueError("moe_gating_top_k_hash: groups and hash routing are not listed")
    if norm_type not in (0, 1, 2):
        raise ValueError(f"moe_gating_top_k_hash: norm_type {norm_type}")
    wide = x.float()
    score = wide.softmax(-1) if norm_type == 0 else wide.sigmoid() if norm_type == 1 else softplus(wide).sqrt()
    choice = score if bias is None else score + bias.float()
    if bias_vl is not None:
        assert input_ids is not None
        image = (input_ids >= image_sentinel_lo) & (input_ids < image_sentinel_lo + image_sentinel_count)
        choice = torch.where(image.view(-1, 1), score + bias_vl.float(), choice)
    experts = torch.sort(choice, dim=-1, descending=True, stable=True)[1][:, :k]
    weights = score.gather(1, experts)
    if norm_type != 0 or renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), experts.int(), score


def _grouped(
    x: torch.Tensor, weight: Any, weight_scale: Any, x_scale: torch.Tensor, group_list: torch.Tensor, limit: float
) -> tuple[torch.Tensor, ...]:
    counts = torch.diff(group_list, prepend=group_list.new_zeros(1)).tolist()
    out, at = torch.zeros(x.shape[0], weight[0].shape[-1] // 2), 0
    for expert, n in enumerate(counts):
        product = (x[at : at + n].double() @ weight[expert].double()).float()
        out[at : at + n] = clamped_swiglu(
            product * weight_scale[expert].float() * x_scale[at : at + n, None].float(), limit
        )
        at += n
    codes, scale = quantise_rows(out)
    return codes, scale, torch.zeros(0)


@reference
def grouped_matmul_swiglu_quant_weight_nz(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """x INT8 [T, K] sorted by expert, weight INT8 [E, K, 2 N] (NZ), scales [E, 2 N] and [T], cumulative counts int64
    [E]
    -> (INT8 [T, N], scale [T], nothing)."""
    return _grouped(x, weight, weight_scale, x_scale, group_list, swiglu_limit)


@reference
def grouped_matmul_swiglu_quant_weight_nz_tensor_list(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    weight_scale: list[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """The same with one tensor per expert, or one of all in a list."""
    stacked = len(weight) == 1
    return _grouped(
        x,
        weight[0] if stacked else weight,
        weight_scale[0] if stacked else weight_scale,
        x_scale,
        group_list,
        swiglu_limit,
    )


@reference
def npu_dequant_swiglu_quant(
    x: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    activate_left: bool = True,
    quant_mode: int = 0,
    swiglu_mode: int = 0,
    clamp_limit: float = 0.0,
    glu_alpha: float = 1.0,
    glu_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x INT32 [T, 2 N] (the raw accumulator) or BF16 -> (INT8 [T, N], scale FP32 [T])."""
    if bias is not None or quant_scale is not None or quant_mode != 1 or glu_alpha != 1.0 or glu_bias != 0.0:
        raise ValueError("npu_dequant_swiglu_quant: only dynamic quantisation without bias is listed")
    value = x.float()
    if weight_scale is not None:
        scale = weight_scale.float().view(-1, value.shape[-1])
        if group_index is not None and scale.shape[0] > 1:
            scale = scale.repeat_interleave(group_index.long(), 0)
            scale = torch.nn.functional.pad(scale, (0, 0, 0, value.shape[0] - scale.shape[0]))
        value = value * scale
    if activation_scale is not None:
        value = value * activation_scale.float().view(-1, 1)
    if not activate_left:
        value = torch.cat(value.chunk(2, -1)[::-1], -1)
    return quantise_rows(clamped_swiglu(value, clamp_limit))
