"""Codecs of the official checkpoint: FP8 E4M3 and FP4 E2M1 with power-of-two (E8M0) scales.

Source: OCP Microscaling Formats specification 1.0; packing and tiles: spec section 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TILE = 32  # edge of an FP8 tile; length of an FP4 or Engram scale group


def decode_e8m0(codes: Tensor) -> Tensor:
    """``2 ** (code - 127)``; code 255 is NaN. codes: any shape, float8_e8m0fnu or uint8 -> float32.

    Decoded through the integer: copying the byte into a float, or shifting it into an exponent
    field (codes 0 and 255), gives wrong scales without an error.
    """
    exponent = codes.view(torch.uint8).to(torch.int32)
    value = torch.ldexp(torch.ones(exponent.shape, dtype=torch.float32, device=codes.device), exponent - 127)
    return value.masked_fill_(exponent == 255, torch.nan)


def decode_fp8_tiles(weight: Tensor, scale: Tensor) -> Tensor:
    """Dense FP8: weight [out, in] float8_e4m3fn, scale [ceil(out / 32), ceil(in / 32)] E8M0 -> float32."""
    spread = decode_e8m0(scale).repeat_interleave(TILE, 0)[: weight.shape[0]]
    return weight.float().mul_(spread.repeat_interleave(TILE, 1)[:, : weight.shape[1]])


def decode_fp8_rows(rows: Tensor, scale: Tensor) -> Tensor:
    """Engram rows: [n, dim] float8_e4m3fn, scale [n, dim / 32] E8M0 (one per group of a row) -> float32."""
    return rows.float() * decode_e8m0(scale).repeat_interleave(TILE, 1)


def decode_fp4(weight: Tensor, scale: Tensor) -> Tensor:
    """Routed experts: weight [out, in / 2] int8, two codes a byte with the even column in the low
    nibble; scale [out, in / 32] E8M0 -> [out, in] float32."""
    byte = weight.view(torch.uint8)
    value = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float32, device=weight.device)
    every = torch.arange(256, device=weight.device)
    pairs = torch.stack((value[every & 15], value[every >> 4]), dim=1)
    # one look-up per byte: the two float32 values of a byte are moved as one 64-bit word
    words = pairs.view(torch.int64).squeeze(1).index_select(0, byte.flatten().int())
    values = words.view(torch.float32).view(weight.shape[0], -1, TILE)
    return values.mul_(decode_e8m0(scale)[..., None]).flatten(1)
