"""Random numbers that depend on names only, and the encoders of the official number formats."""

from __future__ import annotations

import hashlib

import torch

from .sizes import BLOCK

FP8_MAX = 448.0
FP4_MAX = 6.0


class NamedRandom:
    """Random tensors that depend on (seed, name) only."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def normal(self, name: str, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator(name), dtype=torch.float32)

    def integers(self, name: str, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator(name), dtype=torch.int32)


def power_of_two_scale(amax: torch.Tensor, limit: float) -> torch.Tensor:
    """The smallest power of two ``s`` with ``amax / s <= limit`` (exact, by exponent)."""
    mantissa, exponent = torch.frexp(amax.clamp_min(1e-30) / limit)
    return torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).to(exponent.dtype))


def quantize_fp8_tiles(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense FP8: E4M3 values and one E8M0 scale per 32 x 32 tile (rows padded if need be)."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -rows % BLOCK))
    tiles = padded.view(-1, BLOCK, columns // BLOCK, BLOCK)
    scale = power_of_two_scale(tiles.abs().amax(dim=(1, 3)), FP8_MAX)
    codes = (tiles / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.view(-1, columns)[:rows].contiguous(), scale.to(torch.float8_e8m0fnu)


def quantize_fp8_rows(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Engram table: E4M3 values and one E8M0 scale per 32 neighbours within a row."""
    groups = table.view(table.shape[0], -1, BLOCK)
    scale = power_of_two_scale(groups.abs().amax(dim=-1), FP8_MAX)
    codes = (groups / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.view_as(table), scale.to(torch.float8_e8m0fnu)


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Two 4-bit codes per byte, the even column in the low nibble; stored as I8."""
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous().view(torch.int8)


def quantize_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4: packed E2M1 codes (round to nearest even) and one E8M0 scale per 32 along a row."""
    groups = weight.view(weight.shape[0], -1, BLOCK)
    scale = power_of_two_scale(groups.abs().amax(dim=-1), FP4_MAX)
    values = (groups / scale.unsqueeze(-1)).clamp(-FP4_MAX, FP4_MAX).view_as(weight)
    # boundaries between 0, .5, 1, 1.5, 2, 3, 4, 6; a tie at an odd code goes up
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.zeros(3))
    codes = torch.bucketize(values.abs(), bounds).to(torch.uint8)
    codes |= torch.signbit(values).to(torch.uint8) << 3
    return pack_fp4(codes), scale.to(torch.float8_e8m0fnu)
