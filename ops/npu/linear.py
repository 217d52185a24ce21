"""Linears: floating point, block-diagonal, INT8."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from ..linear import float_linear, grouped_linear
from ..w8a8 import quantize_per_token, w8a8_matmul

NZ = 29  # ACL_FORMAT_FRACTAL_NZ: how the matrix unit reads INT8 weights without rearranging them


def to_nz(weight: Tensor) -> Tensor:
    """[.., out, in] -> [.., in, out] in FRACTAL_NZ. Raises RuntimeError where torch_npu left it row-major."""
    packed: Tensor = torch_npu.npu_format_cast(weight.transpose(-1, -2).contiguous(), NZ)
    if torch_npu.get_npu_format(packed) != NZ:
        raise RuntimeError(
            f"a weight {list(weight.shape)} was not brought into FRACTAL_NZ: torch.npu.config.allow_internal_format is "
            "off; vllm-ascend turns it on when its worker starts"
        )
    return packed


def per_channel(scale: Tensor) -> Tensor:
    """Float32 [.., out, 1] -> [.., out]. Never narrowed: a kernel multiplies the INT32 sums by it."""
    if scale.dtype != torch.float32:
        raise TypeError(f"W8A8 weight scale is {scale.dtype}; it stays float32 from the checkpoint to the kernel")
    return scale.squeeze(-1).contiguous()


@float_linear.register("npu")
def _float_linear(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    wide = weight.dtype
    y = torch.nn.functional.linear(x if x.dtype == wide else x.to(wide), weight)
    return y if dtype is None and y.dtype == x.dtype else y.to(dtype or x.dtype)


@grouped_linear.register("npu", pack={1: lambda weight: weight.transpose(1, 2).contiguous()})
def _grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """weight packed: [groups, in, out], row-major (the kernel takes no FRACTAL_NZ)."""
    y = torch_npu.npu_transpose_batchmatmul(x, weight, perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2))
    return y.flatten(1)  # type: ignore[no-any-return]


@quantize_per_token.register("npu")
def _quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = torch_npu.npu_dynamic_quant(x)
    return codes, scale[:, None]


@w8a8_matmul.register("npu", pack={2: to_nz, 3: per_channel})
def _w8a8_matmul(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """weight packed: [in, out] FRACTAL_NZ; weight_scale packed: [out] float32."""
    y: Tensor = torch_npu.npu_quant_matmul(codes, weight, weight_scale, pertoken_scale=scale[:, 0], output_dtype=dtype)
    return y
