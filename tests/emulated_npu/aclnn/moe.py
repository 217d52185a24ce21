"""Sorting tokens by expert, and back."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from ..c_ascend.moe import quantise_rows
from . import operator


@operator(
    "aclnnMoeInitRoutingV3",
    "x:T experts:T scale:T offset:T active:i capacity:i expert_count:i drop_pad:i counts_type:i counts_flag:b quant_mode:i expert_range:A "
    "row_index_type:i expanded:T row_index:T counts:T expanded_scale:T",
)
def init_routing(a: SimpleNamespace) -> None:
    """x [T, D], experts int32 [T, k] -> rows sorted by expert; counts per expert (type 1) or cumulative (type 0).

    Experts outside of expert_range sort behind all others: those rows are of no use to this rank.
    """
    if a.drop_pad != 0 or a.quant_mode not in (-1, 1) or a.row_index_type != 0 or a.counts_type not in (0, 1):
        raise ValueError("MoE routing: this form is not listed")
    first, last = a.expert_range
    flat = a.experts.flatten().long()
    local = (flat >= first) & (flat < last)
    order = torch.where(local, flat, a.expert_count).argsort(stable=True)
    rows = a.x[order // a.experts.shape[1]]
    if a.quant_mode == 1:
        rows, scale = quantise_rows(rows.float())
        a.expanded_scale.copy_(scale)
    a.expanded.copy_(rows[: a.expanded.shape[0]])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    a.row_index.copy_(torch.where(local, inverse, -1) if (first, last) != (0, a.expert_count) else inverse)
    counts = torch.bincount(flat[local] - first, minlength=last - first)
    a.counts.copy_(counts if a.counts_type == 1 else counts.cumsum(0))


@operator("aclnnMoeTokenUnpermute", "tokens:T row_index:T weights:T padded:b shape:A out:T")
def token_unpermute(a: SimpleNamespace) -> None:
    """out[t] = sum over its k rows, weighted; rows with a negative index were not computed here."""
    k = a.weights.shape[1] if a.weights is not None else 1
    index = a.row_index.long()
    rows = a.tokens.float()[index.clamp_min(0)].masked_fill((index < 0)[:, None], 0).view(-1, k, a.tokens.shape[-1])
    a.out.copy_((rows * a.weights.float().unsqueeze(-1)).sum(1) if a.weights is not None else rows.sum(1))
