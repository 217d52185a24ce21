"""Pooling of neighbouring tokens into one compressed row."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import operator


@operator
def pool_pairs(first: Tensor, second: Tensor) -> Tensor:
    """Pool two tokens channel by channel, weighted by a softmax of their gates.

    first, second: [T, 2 d] float32, values then gates -> [T, d] float32. Source: spec section 3.5
    (ratio 2, no overlap, no positional term).
    """
    kv = torch.stack((first, second), dim=1)
    values, gates = kv.chunk(2, dim=-1)
    return (values * gates.softmax(dim=1)).sum(1)


@pool_pairs.register("cpu")
def _pool_pairs_cpu(first: Tensor, second: Tensor) -> Tensor:
    (a, gate_a), (b, gate_b) = first.chunk(2, dim=-1), second.chunk(2, dim=-1)
    return torch.lerp(a, b, torch.sigmoid(gate_b - gate_a))  # a softmax of two is a sigmoid
