"""RMSNorm, alone and with what reads its result."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import REFERENCE, operator
from .w8a8 import quantize_per_token


@operator
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x * rsqrt(mean(x ** 2) + eps)`` over the last dimension.

    x: [..., d], any float dtype; weight: [d] float32. Returns x's shape and dtype. Computed in
    float32 with one rounding at the end. eps is 1e-20 in DeepSeek-V4.1: its norm inputs can be of
    the order of 1e-8. Source: spec section 3.2.
    """
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


@rms_norm.register("cpu")
def _rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


@operator
def rms_norm_cast(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As ``rms_norm``, and the same values in float32: the router reads those, the experts the others."""
    y = rms_norm.implementations[REFERENCE](x, weight, eps)
    return y, y.float()


@rms_norm_cast.register("cpu")
def _rms_norm_cast_cpu(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y = rms_norm(x, weight, eps)
    return y, y.float()


@operator
def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``quantize_per_token`` of ``rms_norm``, not rounded in between: codes int8 [T, d], scale float32 [T, 1]."""
    return quantize_per_token.implementations[REFERENCE](rms_norm.implementations[REFERENCE](x.float(), weight, eps))


@rms_norm_quantize.register("cpu")
def _rms_norm_quantize_cpu(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return quantize_per_token(rms_norm(x.float(), weight, eps))
