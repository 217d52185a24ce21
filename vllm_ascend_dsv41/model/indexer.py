"""Choosing compressed rows (index sources only)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..cache import IndexKeyCache
from ..layer_plan import CandidateRole, LayerPlan
from ..ops import apply_rope, select_rows
from ..upstream import ReplicatedLinear
from .parameters import FloatMatrix
from .step import Step


class Indexer(nn.Module):
    """Scores the index keys of the layer's KV source. Replicated: every rank selects the same rows.

    Source: spec section 3.6.
    """

    def __init__(
        self, config: Any, plan: LayerPlan, keys: IndexKeyCache, dtype: torch.dtype, quant_config: Any, prefix: str
    ) -> None:
        super().__init__()
        self.ratio, self.heads, self.topk = plan.ratio, config.index_n_heads, config.index_topk
        self.keys_prefix = keys.prefix
        self._keys = [keys]  # in a list: it belongs to the KV source's module, not to this one
        self.role = plan.candidate_role
        self.topk_blocks = getattr(config, "candidate_topk_blocks", 0)
        self.block_size = getattr(config, "candidate_block_size", 0)
        width = config.index_n_heads * config.index_head_dim
        self.wq_b = ReplicatedLinear(
            config.q_lora_rank, width, bias=False, quant_config=quant_config, prefix=f"{prefix}.wq_b", return_bias=False
        )
        self.weights_proj = FloatMatrix(config.hidden_size, config.index_n_heads, dtype)
        keys.plans.add(("index", self.heads, config.index_head_dim, self.topk, self.ratio))
        self.scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5

    def forward(self, x: Tensor, qr: Any, step: Step) -> None:
        """x [T, D], qr [T, q_lora_rank] as ``wq_b`` takes it: sets ``step.selected`` and, at the candidate source,
        ``step.candidates``."""
        q = apply_rope(self.wq_b(qr).unflatten(-1, (self.heads, -1)), step.rope(compressed=True))
        weights = self.weights_proj(x).float() * self.scale
        if step.metadata is None:
            return
        meta = step.metadata[self.keys_prefix]
        publishes = self.role is CandidateRole.SOURCE
        step.selected, published = select_rows(
            q,
            weights,
            self._keys[0].kv_cache,
            self._keys[0].key_scale,
            meta.batch,
            meta.block_table,
            self.topk,
            self.ratio,
            self.block_size,
            self.topk_blocks if publishes else 0,
            step.candidates if self.role is CandidateRole.CONSUMER else None,
        )
        if publishes:
            step.candidates = published
