"""The Engram of one layer: table rows in, gated values added to the streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops import engram_inject
from ..upstream import ColumnParallelLinear
from .engram_memory import EngramMemory
from .parameters import empty
from .step import Step


class Engram(nn.Module):
    """Projects the rows of one layer and adds them to the streams.

    ``index``: which of the Engram layers; ``rotation``: block of the checkpoint's rotation [32, 32], None when it has
    none. Source: spec section 3.9.
    """

    rotation: Tensor | None
    qk_weight: Tensor

    def __init__(
        self, config: Any, index: int, memory: EngramMemory, rotation: Tensor | None, quant_config: Any, prefix: str
    ) -> None:
        super().__init__()
        self.register_buffer("rotation", rotation, persistent=False)
        self.index, self.eps = index, config.rms_norm_eps
        self._finish = memory.finish  # the memory itself is a module of the backbone, not of every layer
        self.wkv = ColumnParallelLinear(
            memory.columns * config.engram_head_dim,
            (config.hc_mult + 1) * config.hidden_size,
            bias=False,
            gather_output=True,
            quant_config=quant_config,
            prefix=f"{prefix}.wkv",
            return_bias=False,
        )
        self.q_weight, self.k_weight = (empty(config.hc_mult, config.hidden_size) for _ in range(2))
        self.register_buffer("qk_weight", torch.empty_like(self.q_weight), persistent=False)

    def after_loading(self) -> None:
        """What the gate multiplies by: once, not in every step."""
        self.qk_weight.copy_(self.q_weight * self.k_weight)

    def forward(self, streams: Tensor, step: Step) -> Tensor:
        """streams [T, hc, D] -> the same."""
        kv = self.wkv(self._finish(step.engram[self.index]).flatten(1))
        return engram_inject(streams, kv, self.qk_weight, step.dead, self.eps, self.rotation)
