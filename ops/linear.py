"""Linears in floating point: float32 accumulation, one rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import operator


@operator
def float_linear(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x [..., in] @ weight [out, in].T with float32 accumulation and one rounding to ``dtype`` (x's)."""
    return (x.float() @ weight.float().T).to(dtype or x.dtype)


FEW = 4
_HAS_BF16_DOT = torch.cpu._is_avx512_bf16_supported()


@float_linear.register("cpu")
def _float_linear_cpu(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or x.dtype
    # Without BF16 instructions oneDNN's BF16 GEMM is up to 7 times slower than converting the weight
    # first; few rows are bound by reading the weight instead (benchmarks/README.md).
    if x.dtype == weight.dtype == dtype and (_HAS_BF16_DOT or x.shape[0] <= FEW or dtype == torch.float32):
        return torch.nn.functional.linear(x, weight)
    return (x.float() @ weight.float().T).to(dtype)


@operator
def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Block-diagonal linear: x [T, groups, in], weight [groups, out, in] -> [T, groups * out] in x's
    dtype. Source: spec section 3.3 (``wo_a``)."""
    return torch.einsum("tgi,goi->tgo", x.float(), weight.float()).flatten(1).to(x.dtype)


@grouped_linear.register("cpu")
def _grouped_linear_cpu(x: Tensor, weight: Tensor) -> Tensor:
    same = x.dtype == weight.dtype and (_HAS_BF16_DOT or len(x) <= FEW or x.dtype == torch.float32)
    left, right = x.transpose(0, 1), weight.transpose(1, 2)
    product = torch.bmm(left, right) if same else torch.bmm(left.float(), right.float())
    return product.transpose(0, 1).flatten(1).to(x.dtype)
