"""Hyper-connections with delayed pre-mix: several residual streams, mixed by small learned matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import operator


@operator
def hc_coefficients(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of one sublayer: streams [T, hc, D], fn [(2 + hc) hc, hc D], scale [3],
    base [(2 + hc) hc], all but the streams float32 -> pre [T, hc], post [T, hc], comb [T, hc, hc].

    comb[t, i, j] is what stream i gives to stream j; made nearly doubly stochastic by
    ``iterations`` Sinkhorn rounds that end on columns. ``pre`` belongs to the *next* sublayer's
    input. Source: spec section 3.1; vLLM ``kernels/mhc/torch.py`` ``mhc_pre_delayed_torch``.
    """
    hc = streams.shape[1]
    flat = streams.flatten(1).float()
    mixes = (flat @ fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    pre = torch.sigmoid(mixes[:, :hc] * scale[0] + base[:hc]) + eps
    post = 2 * torch.sigmoid(mixes[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    comb = (mixes[:, 2 * hc :] * scale[2] + base[2 * hc :]).unflatten(1, (hc, hc)).softmax(-1) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return pre, post, comb


@hc_coefficients.register("cpu")
def _hc_coefficients_cpu(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    hc = streams.shape[1]
    flat = streams.flatten(1).float()
    mixes = (flat @ fn.T).mul_(torch.rsqrt(torch.linalg.vecdot(flat, flat).div_(flat.shape[1]) + norm_eps)[:, None])
    mixes = torch.addcmul(base, mixes, scale.repeat_interleave(torch.tensor([hc, hc, hc * hc])))
    pre, post = mixes[:, : 2 * hc].sigmoid().split(hc, 1)
    # tokens last: the 16 entries of comb become rows as long as the batch, and the 39 steps vectorise
    comb = mixes[:, 2 * hc :].unflatten(1, (hc, hc)).permute(1, 2, 0).contiguous().softmax(1).add_(eps)
    comb.div_(comb.sum(0, keepdim=True).add_(eps))
    for _ in range(iterations - 1):
        comb.div_(comb.sum(1, keepdim=True).add_(eps))
        comb.div_(comb.sum(0, keepdim=True).add_(eps))
    return pre + eps, 2 * post, comb.permute(2, 0, 1)


@operator
def hc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Input of a sublayer: streams [T, hc, D], pre [T, hc] float32 -> [T, D], one rounding."""
    return (pre[..., None] * streams.float()).sum(1).to(streams.dtype)


@hc_collapse.register("cpu")
def _hc_collapse_cpu(streams: Tensor, pre: Tensor) -> Tensor:
    return torch.bmm(pre[:, None], streams.float()).squeeze(1).to(streams.dtype)


@operator
def hc_pre(
    streams: Tensor, pre: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input of a sublayer, by the coefficients ``pre`` [T, hc] of the one before it, and its own coefficients:
    -> [T, D] (``hc_collapse``), then the next pre, post and comb (``hc_coefficients``). One pass over the streams."""
    collapse, coefficients = hc_collapse.implementations["reference"], hc_coefficients.implementations["reference"]
    return collapse(streams, pre), *coefficients(streams, fn, scale, base, iterations, eps, norm_eps)


@hc_pre.register("cpu")
def _hc_pre_cpu(
    streams: Tensor, pre: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return hc_collapse(streams, pre), *hc_coefficients(streams, fn, scale, base, iterations, eps, norm_eps)


@operator
def hc_expand(sublayer: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Streams after a sublayer: out[t, j] = post[t, j] sublayer[t] + sum_i comb[t, i, j] streams[t, i].

    sublayer [T, D], streams [T, hc, D], post [T, hc], comb [T, hc, hc] -> [T, hc, D], one rounding.
    """
    mixed = torch.einsum("tij,tid->tjd", comb, streams.float())
    return (post[..., None] * sublayer.float()[:, None] + mixed).to(streams.dtype)


@hc_expand.register("cpu")
def _hc_expand_cpu(sublayer: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    # the sublayer's output as one more stream: a single batched product
    inputs = torch.cat((streams, sublayer[:, None]), dim=1).float()
    weights = torch.cat((comb, post[:, None]), dim=1)
    return torch.bmm(weights.transpose(1, 2), inputs).to(streams.dtype)
