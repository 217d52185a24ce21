"""Symmetric INT8: weights per output channel, activations per token, Engram rows per group of 32."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import operator

INT8_MAX = 127
ENGRAM_GROUP = 32


def channel_scale(absmax: Tensor) -> Tensor:
    """absmax float32 -> the smallest BF16 number not below absmax / 127, as float32; 0 for 0.

    A reader that keeps scales in BF16, as vllm-ascend does, loses nothing, and no code passes 127.
    """
    bits = ((absmax / INT8_MAX).view(torch.int32) + 0xFFFF) & -0x10000
    scale = bits.view(torch.float32)
    # the quotient may have been rounded down onto a BF16 number; this product is exact
    short = scale.double() * INT8_MAX < absmax.double()
    return (bits + short.to(torch.int32) * 0x10000).view(torch.float32)


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> codes int8 [out, in], scale float32 [out, 1], ``channel_scale`` of the row's absmax.

    A row of zeros gets scale 0 and codes 0. Source: spec section 5.2.
    """
    f = weight.float()
    low, high = f.aminmax(dim=1, keepdim=True)
    scale = channel_scale(torch.maximum(high, -low).abs())  # abs: a row of -0.0 has scale 0.0
    codes = (f / scale.where(scale > 0, 1.0)).round_().clamp_(-INT8_MAX, INT8_MAX)
    return codes.to(torch.int8), scale


def quantize_engram_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows [n, dim] float32 -> codes int8 [n, dim], scale float32 [n, dim / 32], a power of two.

    scale = 2 ** ceil(log2(absmax / 127)), 1 for a group of zeros; round to nearest even, clamp to
    +-127. Source: spec section 5.4.
    """
    groups = rows.float().unflatten(1, (-1, ENGRAM_GROUP))
    amax = groups.abs().amax(-1)
    mantissa, exponent = torch.frexp(amax / INT8_MAX)  # exact exponent; log2 may round up to an integer
    scale = torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).to(exponent.dtype))
    scale = scale.where(amax > 0, 1.0)
    codes = (groups / scale[..., None]).round_().clamp_(-INT8_MAX, INT8_MAX)
    return codes.to(torch.int8).flatten(1), scale


@operator
def quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, d] -> codes int8 [T, d], scale float32 [T, 1] = absmax / 127 (0 for a row of zeros).

    Source: ``torch_npu.npu_dynamic_quant`` (symmetric, per token); spec section 5.5.
    """
    f = x.float()
    scale = f.abs().amax(-1, keepdim=True) / INT8_MAX
    codes = (f / scale.where(scale > 0, 1.0)).round().clamp(-INT8_MAX, INT8_MAX)
    return codes.to(torch.int8), scale


@operator
def w8a8_matmul(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """INT8 product with float32 scales: codes [T, in] int8, scale [T, 1], weight [out, in] int8,
    weight_scale [out, 1] float32 -> [T, out] in ``dtype``, one rounding after both scales.

    Source: ``torch_npu.npu_quant_matmul``; spec section 5.5 (scales stay float32).
    """
    product = codes.double() @ weight.double().T  # exact: |sum| < 2 ** 53
    return (product.float() * scale * weight_scale.T).to(dtype)


FEW = 8  # rows times threads up to which one compiled thread beats converting the weight for a float GEMM


@w8a8_matmul.register("cpu")
def _w8a8_matmul_cpu(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    if len(codes) * torch.get_num_threads() <= FEW:
        from .integer_product import integer_product

        product = torch.empty(len(codes), len(weight), dtype=torch.float32)
        integer_product(codes.contiguous().numpy(), weight.numpy(), product.numpy())
    else:
        # The products are integers, exact in float32 until a partial sum passes 2 ** 24, which takes more than
        # 1040 products of 127 * 127 with equal signs. torch._int_mm is 10 to 30 times slower without VNNI.
        product = codes.float() @ weight.float().T
    return product.mul_(scale).mul_(weight_scale.T).to(dtype)
