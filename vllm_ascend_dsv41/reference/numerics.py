"""Number formats of the two checkpoints and of the activations between them.

Sources: OCP Microscaling Formats specification 1.0 (E2M1, E4M3, E8M0); spec section 2 (packing)
and 3.4 (KV cache grids).
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

E2M1_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1_MAX, E4M3_MAX, INT8_MAX = 6.0, 448.0, 127.0


class Grid(Enum):
    """How activations are rounded between the linears.

    ``exact``: not at all. ``mx``: the trained grid, MXFP8 in front of every FP8/FP4 linear and
    FP8/FP4 KV rows. ``w8a8``: symmetric INT8 per token in front of every INT8 linear.
    """

    EXACT = "exact"
    MX = "mx"
    W8A8 = "w8a8"


# ---- decoding checkpoint tensors ---------------------------------------------------------------


def decode_e8m0(codes: Tensor) -> Tensor:
    """``2 ** (code - 127)`` as float32; code 255 is NaN. A bit shift would break codes 0 and 255."""
    exponent = codes.view(torch.uint8).to(torch.int32)
    value = torch.ldexp(torch.ones(exponent.shape), exponent - 127)
    return torch.where(exponent == 255, torch.nan, value)


def decode_e2m1(packed: Tensor) -> Tensor:
    """[rows, columns / 2] bytes -> [rows, columns] float32; the even column is the low nibble."""
    byte = packed.view(torch.uint8)
    codes = torch.stack((byte & 15, byte >> 4), dim=-1).flatten(-2).long()
    return E2M1_VALUES[codes & 7] * (1 - 2 * (codes >> 3)).float()


def spread(scale: Tensor, shape: tuple[int, int], tile: tuple[int, int]) -> Tensor:
    """Repeat one scale per ``tile`` until it covers a matrix of ``shape``."""
    return scale.repeat_interleave(tile[0], 0)[: shape[0]].repeat_interleave(tile[1], 1)[:, : shape[1]]


# ---- rounding activations ----------------------------------------------------------------------


def power_of_two_scale(amax: Tensor, limit: float) -> Tensor:
    """The smallest power of two ``s`` with ``amax / s <= limit``."""
    mantissa, exponent = torch.frexp(amax / limit)
    return torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).to(exponent.dtype))


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 value, ties to the even code; magnitudes above 6 saturate."""
    values = E2M1_VALUES.to(x.device)
    middle = (values[1:] + values[:-1]) / 2
    magnitude = x.abs()
    code = torch.bucketize(magnitude, middle)  # a tie stays at the lower code
    tie_up = (magnitude == middle[code.clamp_max(6)]) & (code % 2 == 1) & (code < 7)
    return torch.copysign(values[code + tie_up.long()], x)


def _groups(x: Tensor, size: int) -> Tensor:
    groups: Tensor = x.float().unflatten(-1, (-1, size))
    return groups


def round_mxfp8(x: Tensor, group: int = 32) -> Tensor:
    """E4M3 with one power-of-two scale per ``group`` values; shape and dtype of ``x``."""
    g = _groups(x, group)
    scale = power_of_two_scale(g.abs().amax(-1, keepdim=True).clamp_min(1e-4), E4M3_MAX)
    codes = (g / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2).to(x.dtype)


def round_mxfp4(x: Tensor, group: int = 32) -> Tensor:
    """E2M1 with one power-of-two scale per ``group`` values (index queries and keys)."""
    g = _groups(x, group)
    scale = power_of_two_scale(g.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-126), E2M1_MAX)
    return (round_e2m1(g / scale) * scale).flatten(-2).to(x.dtype)


def round_nvfp4(x: Tensor, group: int = 16) -> Tensor:
    """E2M1 with one E4M3 scale per ``group`` values and no second-level scale (compressed rows)."""
    g = _groups(x, group)
    amax = g.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-9)
    scale = (amax / E2M1_MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn).float()
    return (round_e2m1((g / scale).clamp(-E2M1_MAX, E2M1_MAX)) * scale).flatten(-2).to(x.dtype)


def round_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric INT8 per row: integral float32 codes and float32 scale ``amax / 127`` [..., 1]."""
    f = x.float()
    scale = f.abs().amax(-1, keepdim=True) / INT8_MAX
    codes = torch.where(scale > 0, f / scale, 0.0).round().clamp(-INT8_MAX, INT8_MAX)
    return codes, scale
