"""The vision tower: patches of one picture -> embeddings of its image tokens.

Source: spec section 3.11. Positions are two-dimensional, rotated in split halves (not interleaved).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .checkpoint import Checkpoint
from .config import Config

EPS = 1e-6  # the tower keeps the common epsilon; only the text model uses 1e-20


class Vision:
    """``checkpoint`` weights in ``dtype``; matrix products in float32, rounded once."""

    def __init__(self, checkpoint: Checkpoint, config: Config, dtype: torch.dtype) -> None:
        self.checkpoint, self.config, self.dtype = checkpoint, config.vision, dtype

    def _weight(self, name: str) -> Tensor:
        return self.checkpoint.vector(name)

    def _linear(self, x: Tensor, prefix: str, bias: bool = True) -> Tensor:
        y = x.float() @ self._weight(f"{prefix}.weight").T
        return (y + self._weight(f"{prefix}.bias") if bias else y).to(self.dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        f = x.float()
        return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + EPS) * self._weight(name)).to(self.dtype)

    def _rotation(self, rows: int, columns: int) -> Callable[[Tensor], Tensor]:
        quarter = self.config.hidden_size // self.config.heads // 4
        inverse = self.config.rope_theta ** -(torch.arange(quarter).float() / quarter)
        height = torch.arange(rows).repeat_interleave(columns)[:, None] * inverse
        width = torch.arange(columns).repeat(rows)[:, None] * inverse
        angle = torch.cat((height, width), dim=-1).repeat(1, 2)[:, None]  # [patches, 1, head_dim]

        def rotate(x: Tensor) -> Tensor:
            f = x.float()
            low, high = f.chunk(2, dim=-1)
            return (f * angle.cos() + torch.cat((-high, low), dim=-1) * angle.sin()).to(self.dtype)

        return rotate

    def tower(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """``patches`` [rows * columns, 3, p, p] -> features [rows * columns, hidden]."""
        x = self._linear(patches.flatten(1), "vision.patch_embed.proj")
        rotate = self._rotation(*grid)
        heads = self.config.heads
        for block in range(self.config.layers):
            p = f"vision.blocks.{block}"
            qkv = self._linear(self._norm(x, f"{p}.norm1.weight"), f"{p}.attn.wqkv")
            q, k, v = (part.unflatten(-1, (heads, -1)) for part in qkv.chunk(3, dim=-1))
            q, k, v = (part.transpose(0, 1).float() for part in (rotate(q), rotate(k), v))
            mixed = F.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, dim=-1) @ v
            x = x + self._linear(mixed.transpose(0, 1).flatten(1).to(self.dtype), f"{p}.attn.wo")
            y = self._linear(self._norm(x, f"{p}.norm2.weight"), f"{p}.mlp.w1", bias=False)
            gate, up = y.chunk(2, dim=-1)
            x = x + self._linear(F.silu(gate) * up, f"{p}.mlp.w2", bias=False)
        return self._norm(x, "vision.norm.weight")

    def align(self, features: Tensor, grid: tuple[int, int]) -> Tensor:
        """Features [rows * columns, hidden] -> one embedding per ``downsample_ratio`` squared patches."""
        step = self.config.downsample_ratio
        image = features.view(*grid, -1).permute(2, 0, 1)
        image = F.pad(image, (0, -grid[1] % step, 0, -grid[0] % step))
        merged = F.unfold(image[None].float(), step, stride=step)[0].T.to(self.dtype)
        hidden = F.gelu(self._linear(merged, "aligner.w1"))
        return self._linear(hidden, "aligner.w2")


def merge(
    embeddings: Tensor, token_types: Tensor, pictures: list[Tensor], start: Tensor, newline: Tensor, end: Tensor
) -> Tensor:
    """Overwrite the embeddings [L, D] of image spans.

    ``token_types`` [L]: -1 text, 0 start, 1 image, 2 newline, 3 end of a picture.
    """
    merged = embeddings.clone()
    for kind, value in ((0, start), (2, newline), (3, end)):
        merged[token_types == kind] = value.to(merged.dtype)
    if pictures:
        merged[token_types == 1] = torch.cat(pictures).to(merged.dtype)
    return merged
