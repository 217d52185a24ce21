"""Producing compressed rows and their index keys (KV sources only)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..cache import CompressedCache, IndexKeyCache, OpenGroupCache
from ..layer_plan import LayerPlan
from ..ops import int8_index_keys, pool_open_groups, store_compressed
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
            return inputs[:, : self.rows.width].to(x.dtype)
        meta = step.metadata[self.open_group.prefix]
        own = self.open_group.kv_cache, meta.block_table, meta.batch, meta.slot_mapping
        return pool_open_groups(inputs, *own).to(x.dtype)

    def forward(self, x: Tensor, step: Step) -> None:
        """x [T, D], the attention's normalised input."""
        latent = self.norm(self._pool(x, step))
        rope = step.rope(compressed=True, ratio=self.ratio)
        key = self.wk(latent)  # from the latent before its own rotation
        if step.metadata is not None:
            rows, keys = (step.metadata[cache.prefix].slot_mapping for cache in (self.rows, self.keys))
            norm, cache = (self.k_norm.weight, self.k_norm.eps), (self.keys.kv_cache, self.keys.key_scale)
            store_compressed(latent, key, *norm, rope, self.rows.kv_cache, rows, *cache, keys, self.ratio)
