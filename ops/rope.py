"""Rotary position embedding on the last dimensions, neighbouring pairs rotated together."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from .registry import operator


def rope_frequencies(
    dim: int,
    theta: float,
    factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_positions: int = 0,
) -> Tensor:
    """Angle per position of every pair: [dim / 2] float32.

    ``factor`` other than 1 applies YaRN (no length test, no magnitude scale). Source: spec
    section 3.3; YaRN: arXiv 2309.00071 section 3.2.
    """
    k = torch.arange(dim // 2, dtype=torch.float32)
    # in float32 and in this order, as trained: other roundings are off by 6e-4 at position 65,536
    frequency = 1.0 / theta ** (2 * k / dim)
    if factor != 1.0:

        def dimension(turns: float) -> float:
            return dim * math.log(original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(dimension(beta_fast)), 0), min(math.ceil(dimension(beta_slow)), dim - 1)
        ramp = ((k - low) / max(high - low, 1e-3)).clamp(0, 1)
        frequency = frequency / factor * ramp + frequency * (1 - ramp)
    return frequency


class Rotation:
    """cos, sin: [T, dim / 2] float32, of one position per token; what layers share is worked out once."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin
        self.dim = 2 * cos.shape[1]

    def to_host(self) -> Rotation:
        """The same on the CPU."""
        return Rotation(self.cos.cpu(), self.sin.cpu())

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, 1, dim], every angle twice: as kernels read them that rotate neighbours."""
        shape = len(self.cos), 1, 1, self.dim
        return tuple(part[..., None].expand(-1, -1, 2).reshape(shape) for part in (self.cos, self.sin))  # type: ignore[return-value]


def rope_rotation(frequency: Tensor, positions: Tensor) -> Rotation:
    """frequency [dim / 2] float32, positions [T] int64 -> the rotation of each token.

    Computed for the positions of a step: a table for 1,048,576 positions would take 256 MiB.
    """
    angle = positions.float()[:, None] * frequency
    return Rotation(angle.cos(), angle.sin())


@operator
def apply_rope(x: Tensor, rotation: Rotation, inverse: bool = False) -> Tensor:
    """Rotate the last ``rotation.dim`` values of each vector. x itself may be overwritten.

    x: [T, d] or [T, heads, d]; inverse: rotate back. Returns x's shape and dtype.
    Source: spec section 3.3 (GPT-J pairs (2i, 2i + 1), last dimensions).
    """
    dim, cos = rotation.dim, rotation.cos
    sin = -rotation.sin if inverse else rotation.sin
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    even, odd = x[..., -dim:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-dim], turned.to(x.dtype)), dim=-1)
