"""RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import operator


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
