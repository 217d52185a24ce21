"""Routing and experts of the mixture of experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import float_linear
from .registry import REFERENCE, operator
from .w8a8 import quantize_per_token, w8a8_matmul

NEVER = -1e30  # a bias that keeps a column of the logits from being chosen


@operator
def route(
    logits: Tensor,
    bias: Tensor,
    topk: int,
    scaling: float,
    image_bias: Tensor | None = None,
    flags: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Experts of every token: logits [T, E] float32, bias [E] float32.

    With ``image_bias`` [E] the last column is no expert but a flag, not 0 for image tokens, whose bias that is; the
    last entry of both biases is then ``NEVER``. ``flags`` [T] int64, 1 for image tokens, stands in for that column.

    score = sqrt(softplus(logit)); the ``topk`` experts with the largest score + bias are chosen
    (ties: smallest index); their scores without bias, normalised to sum 1 and times ``scaling``, are
    the weights. Returns weights [T, topk] float32, ids [T, topk] int32. Source: spec section 3.8.
    """
    scores = F.softplus(logits.float()).sqrt()
    if image_bias is not None:
        image = logits[:, -1] if flags is None else flags
        bias = torch.where(image[:, None] != 0, image_bias, bias)
    ids = torch.sort(scores + bias, dim=1, descending=True, stable=True).indices[:, :topk]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(1, keepdim=True) + 1e-20) * scaling, ids.int()


@operator
def swiglu(gate_up: Tensor, limit: float, weights: Tensor | None = None) -> Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit) * weights``: gate_up [T, 2 I], weights
    [T, 1] float32 -> [T, I] in gate_up's dtype, in float32 with one rounding. Source: spec section 3.8."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    inner = F.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
    return (inner if weights is None else inner * weights).to(gate_up.dtype)


def _hit_experts(ids: Tensor, first: int, experts: int) -> list[tuple[int, Tensor]]:
    """(local expert, positions in ids.flatten()) for every local expert that some token chose."""
    local = ids.flatten().long() - first
    local = local.where((local >= 0) & (local < experts), -1)
    order = local.argsort(stable=True)
    counts = torch.bincount(local + 1, minlength=experts + 1).tolist()
    groups = order.split(counts)[1:]
    return [(expert, group) for expert, group in enumerate(groups) if len(group)]


@operator
def moe_float(
    x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, limit: float, first: int = 0, total: int = 0
) -> Tensor:
    """Sum of the chosen experts, unquantised.

    x: [T, H]; w13: [E, 2 I, H], gate rows then up rows; w2: [E, H, I]; weights: [T, k] float32;
    ids: [T, k] integers; limit: SwiGLU clamp. The stacks are experts ``first`` .. ``first + E - 1`` of ``total`` (0:
    E); others are held elsewhere and add nothing here.
    Returns [T, H] in x's dtype, summed over experts in float32. Source: spec section 3.8.
    """
    linear, act = float_linear.implementations[REFERENCE], swiglu.implementations[REFERENCE]
    return _float_experts(x, w13, w2, weights, ids, limit, first, linear, act)


def _float_experts(
    x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, limit: float, first: int, linear: Any, act: Any
) -> Tensor:
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    flat_weights = weights.flatten()[:, None]
    for expert, group in _hit_experts(ids, first, len(w13)):
        token = group // ids.shape[1]
        inner = act(linear(x[token], w13[expert]), limit, flat_weights[group])
        result.index_add_(0, token, linear(inner, w2[expert]).float())
    return result.to(x.dtype)


@moe_float.register("cpu")
def _moe_float_cpu(
    x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, limit: float, first: int = 0, total: int = 0
) -> Tensor:
    return _float_experts(x, w13, w2, weights, ids, limit, first, float_linear, swiglu)


@operator
def moe_w8a8(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    weights: Tensor,
    ids: Tensor,
    limit: float,
    first: int = 0,
    total: int = 0,
) -> Tensor:
    """As ``moe_float`` with INT8 weights and activations quantised per token in front of both products.

    w13 [E, 2 I, H], w2 [E, H, I] int8; w13_scale [E, 2 I, 1], w2_scale [E, H, 1] float32.
    """
    parts = (op.implementations[REFERENCE] for op in (quantize_per_token, w8a8_matmul, swiglu))
    return _int8_experts(x, (w13, w13_scale, w2, w2_scale), weights, ids, limit, first, *parts)


def _int8_experts(
    x: Tensor, stacks: Any, weights: Tensor, ids: Tensor, limit: float, first: int, quantize: Any, matmul: Any, act: Any
) -> Tensor:
    w13, w13_scale, w2, w2_scale = stacks
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    codes, scale = quantize(x)  # once, not once per expert
    flat_weights = weights.flatten()[:, None]
    for expert, group in _hit_experts(ids, first, len(w13)):
        token = group // ids.shape[1]
        gate_up = matmul(codes[token], scale[token], w13[expert], w13_scale[expert], x.dtype)
        inner = act(gate_up, limit, flat_weights[group])
        y = matmul(*quantize(inner), w2[expert], w2_scale[expert], x.dtype)
        result.index_add_(0, token, y.float())
    return result.to(x.dtype)


@moe_w8a8.register("cpu")
def _moe_w8a8_cpu(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    weights: Tensor,
    ids: Tensor,
    limit: float,
    first: int = 0,
    total: int = 0,
) -> Tensor:
    stacks = w13, w13_scale, w2, w2_scale
    return _int8_experts(x, stacks, weights, ids, limit, first, quantize_per_token, w8a8_matmul, swiglu)
