"""Matrix products: INT8 with scales, grouped by expert, batched with transposition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from .. import formats
from ..library import EmulationError
from . import operator

_QUANT = (
    "x1:T x2:T x1_scale:T x2_scale:T y_scale:T x1_offset:T x2_offset:T y_offset:T bias:T "
    "transpose_x1:b transpose_x2:b group_size:i out:T"
)


def _quant_matmul(a: SimpleNamespace) -> None:
    """INT32 output is the raw accumulator: the scales are then applied by the operator that follows."""
    for name in ("y_scale", "x1_offset", "x2_offset", "y_offset"):
        if (
            getattr(a, name) is not None and getattr(a, name).numel()
        ):  # torch_npu passes empty tensors for some that are absent
            raise ValueError(f"quantised matrix product with {name} is not listed")
    if a.x1.dtype != torch.int8 or a.x2.dtype != torch.int8:
        raise EmulationError(f"quantised matrix product of {a.x1.dtype} and {a.x2.dtype}; expected INT8")
    x1 = a.x1.transpose(-1, -2) if a.transpose_x1 else a.x1
    x2 = a.x2.transpose(-1, -2) if a.transpose_x2 else a.x2
    if x1.shape[-1] != x2.shape[-2]:
        raise EmulationError(
            f"quantised matrix product of {list(x1.shape)} and {list(x2.shape)}: the inner sizes differ"
        )
    product = x1.double() @ x2.double()  # exact
    if a.out.dtype == torch.int32:
        a.out.copy_(product if a.bias is None else product + a.bias.double())
        return
    if a.x2_scale is None or a.x2_scale.numel() not in (1, x2.shape[-1]):
        raise EmulationError(f"quantised matrix product: {x2.shape[-1]} scales expected")
    value = product.float() * a.x2_scale.float()
    if a.bias is not None and a.bias.dtype == torch.int32:
        value = (product + a.bias.double()).float() * a.x2_scale.float()
    if a.x1_scale is not None:
        value = value * a.x1_scale.float()[:, None]
    if a.bias is not None and a.bias.dtype != torch.int32:
        value = value + a.bias.float()
    a.out.copy_(value)


@operator("aclnnQuantMatmulWeightNz", _QUANT)
def quant_matmul_nz(a: SimpleNamespace) -> None:
    if a.described.x2.format != formats.NZ:
        raise EmulationError("aclnnQuantMatmulWeightNz: the weight is not FRACTAL_NZ")
    _quant_matmul(a)


operator("aclnnQuantMatmulV5", _QUANT)(_quant_matmul)

_GROUPED = (
    "x:L weight:L bias:L scale:L offset:L antiquant_scale:L antiquant_offset:L per_token_scale:L group_list:T "
    "activation_input:L "
    "activation_quant_scale:L activation_quant_offset:L split_item:i group_type:i group_list_type:i activation:i"
)
_GROUPED_OUT = " out:L activation_feature_out:L dynamic_quant_scale_out:L"


def _one(values: list[torch.Tensor], i: int) -> torch.Tensor:
    """Of expert i: one tensor per expert, or one that holds all."""
    return values[0][i] if len(values) == 1 else values[i]


def _grouped_matmul(a: SimpleNamespace) -> None:
    """x [T, K] sorted by expert; group_list holds cumulative counts (type 0) or counts (type 1)."""
    if len(a.x) != 1 or a.activation != 0 or a.group_list_type not in (0, 1) or a.offset or a.antiquant_scale:
        raise ValueError("grouped matrix product: this form is not listed")
    x, out = a.x[0], a.out[0]
    counts = (
        a.group_list if a.group_list_type == 1 else torch.diff(a.group_list, prepend=a.group_list.new_zeros(1))
    ).tolist()
    out.zero_()
    at = 0
    for expert, n in enumerate(counts):
        if n:
            rows, weight = x[at : at + n], _one(a.weight, expert)
            value: Any = (
                (rows.double() @ weight.double()).float() if x.dtype == torch.int8 else rows.float() @ weight.float()
            )
            if a.scale and x.dtype == torch.int8:
                value = value * _one(a.scale, expert).float()
            if a.per_token_scale:
                value = value * a.per_token_scale[0][at : at + n, None].float()
            if a.bias:
                value = value + _one(a.bias, expert).float()
            out[at : at + n] = value.to(out.dtype)
        at += n


operator("aclnnGroupedMatmulV4", _GROUPED + _GROUPED_OUT)(_grouped_matmul)
operator("aclnnGroupedMatmulV5", _GROUPED + " tuning:A" + _GROUPED_OUT)(_grouped_matmul)


@operator("aclnnGroupedMatmulWeightNz", _GROUPED + " tuning:A quant_group_size:i" + _GROUPED_OUT)
def grouped_matmul_nz(a: SimpleNamespace) -> None:
    if any(w.format != formats.NZ for w in a.described.weight):
        raise EmulationError("aclnnGroupedMatmulWeightNz: a weight is not FRACTAL_NZ")
    _grouped_matmul(a)


@operator(
    "aclnnTransposeBatchMatMul",
    "x1:T x2:T bias:T scale:T permute_x1:A permute_x2:A permute_y:A cube_math:w batch_split:w out:T",
)
def transpose_batch_matmul(a: SimpleNamespace) -> None:
    if a.bias is not None or a.scale is not None:
        raise ValueError("transposed batched product with bias or scale is not listed")
    value = torch.bmm(a.x1.permute(a.permute_x1).float(), a.x2.permute(a.permute_x2).float())
    a.out.copy_(value.permute(a.permute_y).reshape(a.out.shape))
