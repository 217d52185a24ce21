"""Sorting tokens by expert, and back."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import torch

from ..c_ascend.moe import quantise_rows
from ..library import exchange
from . import operator


@operator(
    "aclnnMoeInitRoutingV3",
    "x:T experts:T scale:T offset:T active:i capacity:i expert_count:i drop_pad:i counts_type:i counts_flag:b "
    "quant_mode:i expert_range:A "
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
    elif a.scale is not None:  # the rows are INT8 already: their scales move with them
        a.expanded_scale.copy_(a.scale.flatten()[order // a.experts.shape[1]])
    a.expanded.copy_(rows[: a.expanded.shape[0]])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    a.row_index.copy_(torch.where(local, inverse, -1) if (first, last) != (0, a.expert_count) else inverse)
    counts = torch.bincount(flat[local] - first, minlength=last - first)
    a.counts.copy_(counts if a.counts_type == 1 else counts.cumsum(0))


@operator("aclnnMoeTokenPermute", "tokens:T experts:T out_tokens:i padded:b permuted:T row_index:T")
def token_permute(a: SimpleNamespace) -> None:
    """Rows sorted by expert; row_index tells where each (token, choice) went."""
    if a.padded:
        raise ValueError("MoE permutation with padding is not listed")
    order = a.experts.flatten().argsort(stable=True)
    choices = a.experts.shape[1] if a.experts.dim() > 1 else 1
    a.permuted.copy_(a.tokens[order // choices][: a.permuted.shape[0]])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    a.row_index.copy_(inverse)


@operator("aclnnMoeTokenUnpermute", "tokens:T row_index:T weights:T padded:b shape:A out:T")
def token_unpermute(a: SimpleNamespace) -> None:
    """out[t] = sum over its k rows, weighted; rows with a negative index were not computed here."""
    k = a.weights.shape[1] if a.weights is not None else 1
    index = a.row_index.long()
    rows = a.tokens.float()[index.clamp_min(0)].masked_fill((index < 0)[:, None], 0).view(-1, k, a.tokens.shape[-1])
    a.out.copy_((rows * a.weights.float().unsqueeze(-1)).sum(1) if a.weights is not None else rows.sum(1))


# ---- dispatch and combine between ranks (MC2): one exchange each, then every rank works out its part ----
_TAG_DISPATCH, _TAG_COMBINE = 1, 2
_WIDTH = 128  # int32 per row of assist_info; the first three name source rank, token and choice


def _exchange(communicator: str, tag: int, value: Any) -> list[Any]:
    return [pickle.loads(data) for data in exchange(communicator, tag, pickle.dumps(value))]


@operator(
    "aclnnMoeDistributeDispatchV4",
    "x:T experts:T scales:T active:T expert_scales:T elastic:T performance:T group:s ranks:i rank:i "
    "expert_count:i tp_group:s tp_ranks:i tp_rank:i "
    "shard_type:i shared_experts:i shared_ranks:i quant_mode:i global_batch:i counts_type:i algorithm:s "
    "zero_experts:i copy_experts:i const_experts:i "
    "expanded:T dynamic_scales:T assist:T counts:T received:T tp_received:T expanded_scales:T",
)
def distribute_dispatch(a: SimpleNamespace) -> None:
    """Sends each active token to the ranks of its experts. Rows arrive by local expert, then source rank, then token;
    expert_token_nums is cumulative (type 0) or not (type 1); quant_mode 2 quantises rows to INT8 on the way."""
    if (
        a.quant_mode not in (0, 2)
        or a.shared_ranks
        or a.elastic is not None
        or a.zero_experts
        or a.copy_experts
        or a.const_experts
    ):
        raise ValueError("MoE dispatch: this form is not listed")
    active = a.active if a.active is not None else torch.ones(a.x.shape[0], dtype=torch.bool)
    sent = _exchange(a.group, _TAG_DISPATCH, (a.x.clone(), a.experts.clone(), active.clone()))
    local = a.expert_count // a.ranks
    rows: list[torch.Tensor] = []
    sources, counts, received = [], [], []
    for expert in range(a.rank * local, (a.rank + 1) * local):
        before = len(rows)
        for source, (x, experts, mask) in enumerate(sent):
            for token, choice in (experts.eq(expert) & mask[: experts.shape[0], None]).nonzero().tolist():
                rows.append(x[token])
                sources.append((source, token, choice))
            received.append(len(rows))
        counts.append(len(rows) - before)
    if len(rows) > a.expanded.shape[0]:
        raise ValueError(f"MoE dispatch: {len(rows)} rows for a buffer of {a.expanded.shape[0]}")
    a.assist.fill_(-1)
    if rows:
        stacked = torch.stack(rows)
        if a.quant_mode == 2:
            stacked, scale = quantise_rows(stacked.float())
            a.dynamic_scales[: len(rows)] = scale
        a.expanded[: len(rows)] = stacked
        a.assist.view(-1, _WIDTH)[: len(rows), :3] = torch.tensor(sources, dtype=a.assist.dtype)
    a.counts.copy_(torch.tensor(counts) if a.counts_type == 1 else torch.tensor(counts).cumsum(0))
    a.received.copy_(torch.tensor(received)[: a.received.numel()])


@operator(
    "aclnnMoeDistributeCombineV4",
    "expanded:T experts:T assist:T sent:T expert_scales:T tp_sent:T active:T activation_scale:T weight_scale:T "
    "group_list:T expanded_scales:T "
    "shared_x:T elastic:T original_x:T alpha1:T alpha2:T constant:T performance:T group:s ranks:i rank:i "
    "expert_count:i tp_group:s tp_ranks:i tp_rank:i "
    "shard_type:i shared_experts:i shared_ranks:i global_batch:i out_dtype:i comm_quant_mode:i group_list_type:i "
    "algorithm:s zero_experts:i "
    "copy_experts:i const_experts:i out:T",
)
def distribute_combine(a: SimpleNamespace) -> None:
    """Brings the rows back and adds them up, weighted by expert_scales in FP32. Inactive tokens get 0."""
    if a.comm_quant_mode or a.shared_x is not None or a.elastic is not None:
        raise ValueError("MoE combine: this form is not listed")
    count = int((a.assist.view(-1, _WIDTH)[: a.expanded.shape[0], 0] >= 0).sum())
    total = torch.zeros(a.out.shape)
    for rows, sources in _exchange(
        a.group, _TAG_COMBINE, (a.expanded[:count].clone(), a.assist.view(-1, _WIDTH)[:count, :3].clone())
    ):
        for row, (source, token, choice) in zip(rows, sources.tolist(), strict=True):
            if source == a.rank:
                total[token] += row.float() * a.expert_scales[token, choice]
    a.out.copy_(total)
