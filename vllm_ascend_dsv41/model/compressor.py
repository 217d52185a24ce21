"""Producing compressed rows and their index keys (KV sources only)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..cache import CompressedCache, IndexKeyCache, OpenGroupCache
from ..layer_plan import LayerPlan
from ..ops import apply_rope, gather_rows, int8_index_keys, pool_pairs, scatter_rows
from .parameters import FloatMatrix, Norm
from .step import Step


class Compressor(nn.Module):
    """Pools ``ratio`` tokens into a latent; its rows and keys serve this layer and those after it.

    Every token computes a latent; only the one that completes a group has a slot to write it to, so
    the shapes do not depend on the data. The first half of a group comes from this step's tokens or,
    when it was computed in an earlier step, from the request's ring. Source: spec section 3.5.
    """

    def __init__(self, config: Any, plan: LayerPlan, dtype: torch.dtype, prefix: str) -> None:
        super().__init__()
        self.ratio, head, index = plan.ratio, config.head_dim, config.index_head_dim
        self.rows = CompressedCache(f"{prefix}.rows", head, dtype, plan.ratio)
        device = torch.get_default_device().type  # vLLM builds models with the device as default
        self.keys = IndexKeyCache(f"{prefix}.keys", index, dtype, plan.ratio, int8_index_keys(device))
        self.open_group = OpenGroupCache(f"{prefix}.open_group", 2 * head) if plan.has_open_group else None
        if self.open_group is None:
            self.wkv = FloatMatrix(config.hidden_size, head, dtype)
        else:  # pooled in float32 throughout
            self.wkv_wgate = FloatMatrix(config.hidden_size, head, torch.float32, parts=2)
        self.norm = Norm(head, config.rms_norm_eps)
        self.wk = FloatMatrix(head, index, dtype)
        self.k_norm = Norm(index, config.rms_norm_eps)

    def _pool(self, x: Tensor, step: Step) -> Tensor:
        if self.open_group is None:
            return self.wkv(x)
        inputs = self.wkv_wgate(x, torch.float32)
        if step.metadata is None:
            return pool_pairs(inputs, inputs).to(x.dtype)
        ring, meta = self.open_group.kv_cache, step.metadata[self.open_group.prefix]
        batch, capacity = meta.batch, ring.shape[1]
        # the token before a request's first was computed in an earlier step
        before = batch.lengths - (batch.query_start[1:] - batch.query_start[:-1]) - 1
        slots = torch.where(before >= 0, meta.block_table[:, 0].long() * capacity + before % capacity, -1)
        earlier = gather_rows(ring, slots).index_select(0, batch.request)
        previous = torch.where(batch.first[:, None], earlier, inputs.roll(1, 0))
        scatter_rows(ring, inputs, meta.slots)
        return pool_pairs(previous, inputs).to(x.dtype)

    def forward(self, x: Tensor, step: Step) -> None:
        """x [T, D], the attention's normalised input."""
        latent = self.norm(self._pool(x, step))
        rope = step.rope(compressed=True, ratio=self.ratio)
        key = apply_rope(self.k_norm(self.wk(latent)), rope)  # from the latent before its own rotation
        row = apply_rope(latent, rope)
        if step.metadata is not None:
            scatter_rows(self.rows.kv_cache, row, step.metadata[self.rows.prefix].slots)
            self.keys.write(key, step.metadata[self.keys.prefix].slots)
