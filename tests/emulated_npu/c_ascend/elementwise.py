"""Norms, rotary embedding, cache scatter."""

from __future__ import annotations

import torch

from . import reference
from .moe import quantise_rows


@reference
def get_physical_device_id(user_device_id: int) -> int:
    return user_device_id


def rms(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (normalised and scaled in FP32, reciprocal deviation)."""
    wide = x.float()
    deviation = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return wide * deviation * gamma.float(), deviation


@reference
def npu_add_rms_norm_bias(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None, epsilon: float = 1e-6
) -> tuple[torch.Tensor, ...]:
    total = x1 + x2
    y, deviation = rms(total, gamma, epsilon)
    return (y if beta is None else y + beta.float()).to(x1.dtype), deviation, total


def _sixteen_bits(name: str, x: torch.Tensor, gamma: torch.Tensor) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16) or gamma.dtype != x.dtype or not x.numel():
        raise ValueError(f"{name}: x {x.dtype} {list(x.shape)}, gamma {gamma.dtype}; expected one dtype of 16 bits")


@reference
def npu_rms_norm_cast(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (rounded, the rounded values as FP32)."""
    _sixteen_bits("npu_rms_norm_cast", x, gamma)
    y = rms(x, gamma, epsilon)[0].to(x.dtype)
    return y, y.float()


def rotate_pairs(x: torch.Tensor) -> torch.Tensor:
    """(x0, x1, x2, x3, ..) -> (-x1, x0, -x3, x2, ..)."""
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def rotate_halves(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


@reference
def inplace_partial_rotary_mul(
    x: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str,
    partial_slice: list[int],
    negate_sin: bool = False,
) -> None:
    """Rotates x[.., start:end] in place by cos r1 and sin r2, which hold every angle twice. A kernel computes
    in FP32.
    """
    start, end = partial_slice
    part, cos, sin = x[..., start:end].float(), r1.float(), r2.float() * (-1 if negate_sin else 1)
    while cos.dim() < part.dim():
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if rotary_mode not in ("interleave", "half"):
        raise ValueError(f"inplace_partial_rotary_mul: rotary_mode {rotary_mode!r}; expected 'interleave' or 'half'")
    turned = rotate_pairs(part) if rotary_mode == "interleave" else rotate_halves(part)
    x[..., start:end] = (part * cos + turned * sin).to(x.dtype)


@reference
def npu_scatter_nd_update_sk(var: torch.Tensor, indices: torch.Tensor, update: torch.Tensor) -> None:
    """var[indices[t]] = update[t]; rows with a negative coordinate are skipped. indices int32 [T, c]."""
    kept = (indices >= 0).all(-1)
    where = indices[kept].long()
    if bool((where >= torch.tensor(var.shape[: indices.shape[-1]])).any()):
        raise ValueError(f"npu_scatter_nd_update_sk: an index is outside of {list(var.shape)}")
    var[tuple(where.unbind(-1))] = update[kept].reshape(-1, *var.shape[indices.shape[-1] :]).to(var.dtype)


@reference
def npu_rms_norm_dynamic_quant(
    x: torch.Tensor,
    gamma: torch.Tensor,
    smooth_scale: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (codes, scale of each row); not rounded to x's dtype in between. x and gamma have one dtype, of 16 bits."""
    _sixteen_bits("npu_rms_norm_dynamic_quant", x, gamma)
    if smooth_scale is not None or beta is not None:
        raise ValueError("npu_rms_norm_dynamic_quant: smoothing and beta are not listed")
    return quantise_rows(rms(x, gamma, epsilon)[0])
