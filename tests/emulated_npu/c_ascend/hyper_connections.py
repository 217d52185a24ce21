"""Manifold-constrained hyper-connections (DeepSeek-V4.1's mHC), as spec/model-and-checkpoint.md 3.1."""

from __future__ import annotations

import torch

from . import reference


@reference
def npu_hc_pre_v3(
    x: torch.Tensor,
    hc_fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    pre_mix: torch.Tensor | None = None,
    *,
    hc_mult: int = 4,
    hc_sinkhorn_iters: int = 20,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
) -> tuple[torch.Tensor, ...]:
    """x [T, m, D] -> (y [T, D], post [T, m], comb [T, m, m], pre [T, m]); y mixes the streams with pre_mix (or with
    pre).

    The Sinkhorn iteration ends on a column step; hc_eps is added to pre, to the softmax and in every division.
    """
    m, flat = hc_mult, x.flatten(1).float()
    mix = (flat @ hc_fn.float().t()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    pre = torch.sigmoid(mix[:, :m] * hc_scale[0] + hc_base[:m]) + hc_eps
    post = 2 * torch.sigmoid(mix[:, m : 2 * m] * hc_scale[1] + hc_base[m : 2 * m])
    comb = torch.softmax((mix[:, 2 * m :] * hc_scale[2] + hc_base[2 * m :]).unflatten(-1, (m, m)), -1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    y = ((pre if pre_mix is None else pre_mix.float()).unsqueeze(-1) * x.float()).sum(1).to(x.dtype)
    return y, post, comb, pre


@reference
def npu_hc_post(x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """x [.., T, D], residual [.., T, m, D] -> post_j x + sum_i comb[i, j] residual_i, in FP32 with one rounding."""
    mixed = torch.einsum("...ij,...ih->...jh", comb.float(), residual.float())
    return (mixed + post.float().unsqueeze(-1) * x.float().unsqueeze(-2)).to(residual.dtype)
