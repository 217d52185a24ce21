"""What the layers of one forward pass share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..engram import Pending
from ..ops import Rotation, rope_frequencies, rope_rotation


class Rope(nn.Module):
    """Frequencies for window rows (no YaRN) and for layers with compressed rows (YaRN)."""

    window: Tensor
    compressed: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        dim, scaling = config.qk_rope_head_dim, rope_scaling(config)
        self.register_buffer("window", rope_frequencies(dim, config.rope_theta), persistent=False)
        compressed = rope_frequencies(
            dim,
            config.compress_rope_theta,
            scaling["factor"],
            scaling["beta_fast"],
            scaling["beta_slow"],
            scaling["original_max_position_embeddings"],
        )
        self.register_buffer("compressed", compressed, persistent=False)


def rope_scaling(config: Any) -> dict[str, Any]:
    """YaRN numbers, under whichever name this vLLM keeps them."""
    for name in ("rope_scaling", "rope_parameters"):
        value = getattr(config, name, None)
        if isinstance(value, dict):
            value = value.get("compress", value)
            if "factor" in value:
                return dict(value)
    raise ValueError("config.json: rope_scaling has no factor; DeepSeek-V4.1 needs its YaRN numbers")


@dataclass
class Step:
    """T tokens of all requests in this step.

    ``metadata``: of each cache by its name (of a draft: its blocks and tables); None in vLLM's dummy runs: no cache
    may then be touched. An index source writes
    ``selected`` (and the candidate source ``candidates``) before the layers that read them, since
    sources come first in layer order.
    """

    positions: Tensor  # [T] int64
    dead: Tensor  # [T] bool: image tokens
    metadata: dict[str, Any] | None
    frequencies: Rope
    engram: list[Pending] = field(default_factory=list)  # a look-up for every Engram layer
    selected: Tensor | None = None  # [T, index_topk] int32
    candidates: Tensor | None = None  # [T, candidate_topk_blocks] int32
    _rope: dict[tuple[bool, int], Rotation] = field(default_factory=dict)
    _columns: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def flags(self) -> Tensor:
        """[T] int64, 1 for image tokens."""
        return self.dead.long()

    def flag_column(self, width: int) -> Tensor:
        """[T, width] float32, zeros but for the last column: the flags. Added to the logits of every router."""
        if width not in self._columns:
            column = torch.zeros(len(self.dead), width, device=self.dead.device)
            column[:, -1] = self.dead
            self._columns[width] = column
        return self._columns[width]

    def rope(self, compressed: bool, ratio: int = 1) -> Rotation:
        """The rotation by each token's position, or by that of the first token of its group."""
        key = (compressed, ratio)
        if key not in self._rope:
            frequency = self.frequencies.compressed if compressed else self.frequencies.window
            position = self.positions if ratio == 1 else self.positions // ratio * ratio
            self._rope[key] = rope_rotation(frequency, position)
        return self._rope[key]
