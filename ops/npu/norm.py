"""RMSNorm, rotary embedding, hyper-connections."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from ..hyper_connections import hc_expand, hc_pre
from ..norm import rms_norm, rms_norm_cast, rms_norm_quantize
from ..rope import Rotation, apply_rope
from ..w8a8 import quantize_per_token


@rms_norm.register("npu")
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The weight stays FP32 beside BF16 rows."""
    normalised: Tensor = torch_npu.npu_rms_norm(x, weight, eps)[0]
    return normalised


def narrowed(weight: Tensor) -> Tensor:
    """As BF16 where that loses nothing, as it is for what checkpoints hold: the fused kernels want x's dtype."""
    narrow = weight.bfloat16()
    return narrow if torch.equal(narrow.float(), weight) else weight


@rms_norm_cast.register("npu", pack={1: narrowed})
def _rms_norm_cast(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if weight.dtype != x.dtype or x.dtype == torch.float32:
        y = rms_norm(x, weight.float(), eps)
        return y, y.float()
    if not x.numel():
        return torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)
    y, wide = torch.ops._C_ascend.npu_rms_norm_cast(x, weight, eps)
    return y, wide


@rms_norm_quantize.register("npu", pack={1: narrowed})
def _rms_norm_quantize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if weight.dtype != x.dtype or x.dtype == torch.float32:
        return quantize_per_token(rms_norm(x, weight.float(), eps))
    if not x.numel():
        return torch.empty_like(x, dtype=torch.int8), torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    codes, scale = torch.ops._C_ascend.npu_rms_norm_dynamic_quant(x, weight, epsilon=eps)
    return codes, scale[:, None]


@apply_rope.register("npu")
def _apply_rope(x: Tensor, rotation: Rotation, inverse: bool = False) -> Tensor:
    """In place, on the last values of each vector."""
    x = x.contiguous()
    cos, sin = rotation.pairs
    heads = x.view(len(x), 1, -1, x.shape[-1])
    end = x.shape[-1]
    torch.ops._C_ascend.inplace_partial_rotary_mul(
        heads, cos, sin, rotary_mode="interleave", partial_slice=[end - rotation.dim, end], negate_sin=inverse
    )
    return x


@hc_pre.register("npu")
def _hc_pre(
    streams: Tensor, pre: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, post, comb, own = torch.ops._C_ascend.npu_hc_pre_v3(
        streams,
        fn,
        scale,
        base,
        pre,
        hc_mult=streams.shape[1],
        hc_sinkhorn_iters=iterations,
        norm_eps=norm_eps,
        hc_eps=eps,
    )
    return x, own, post, comb


@hc_expand.register("npu")
def _hc_expand(sublayer: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The kernel wants a batch dimension in front."""
    mixed: Tensor = torch.ops._C_ascend.npu_hc_post(sublayer[None], streams[None], post[None], comb[None])
    return mixed[0]
