"""Embedding and head in floating point."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops import float_linear
from ..upstream import UnquantizedEmbeddingMethod


class FloatEmbedding(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Embedding rows as stored; logits in float32, whatever the model's dtype.

    Upstream's method keeps a second, packed copy of both tables on CPU: 2.5 GiB each at the released size.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        """Nothing to prepare."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """hidden [T, D] -> logits [T, vocabulary of this rank] float32."""
        logits = float_linear(x, layer.weight, torch.float32)
        return logits if bias is None else logits + bias
