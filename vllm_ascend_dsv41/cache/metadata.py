"""Where the rows of one step lie: built once per cache kind, read by every layer."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops import Batch, plan
from ..upstream import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder, KVCacheLayout


@dataclass
class RowMetadata:
    """Addresses for one cache. All is derived from tensors whose place does not change between steps, without reading
    them on the host: a captured graph follows them."""

    batch: Batch
    block_table: Tensor  # [R, blocks] int32
    slot_mapping: Tensor  # [T] vLLM's slot of each token, block * tokens per block + place; negative: padding


class RowMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Of every kind of cache: what stores rows works their places out itself."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        self._wanted = sorted({key for name in layer_names for key in layers[name].plans})
        self._plans: dict[Hashable, Tensor] = {}

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> RowMetadata:
        """vLLM calls this once per step and cache kind."""
        del common_prefix_len, fast_build
        common = common_attn_metadata
        # vllm-ascend may count padding as one more request, of which only query_start_loc knows
        requests = min(common.num_reqs, len(common.seq_lens))
        # padded to the size of a graph where the runner says so, as its tensors are
        tokens = getattr(common, "num_input_tokens", 0) or common.num_actual_tokens
        start, lengths = common.query_start_loc[: requests + 1], common.seq_lens[:requests]
        batch, planned = (Batch(start, lengths, tokens, common.max_query_len, common.max_seq_len) for _ in range(2))
        for key in self._wanted:
            # on a batch of its own: what is derived out here must not be taken for part of a graph
            value = plan(lengths, planned, *key)
            if value is not None:  # kernels of a captured graph read it from where it was at the capture
                kept = self._plans.setdefault(key, value)
                batch.plans[key] = kept if kept is value else kept.copy_(value)
        return RowMetadata(batch, common.block_table_tensor[:requests], common.slot_mapping[:tokens])


class _Backend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks of a backend: the model calls ``ops``, so there is no attention implementation."""

    @classmethod
    def get_name(cls) -> str:
        return f"DSV41_{cls.__name__}"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("DeepSeek-V4.1 attention is called by the model itself")

    @classmethod
    def get_builder_cls(cls) -> type[RowMetadataBuilder]:
        return RowMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        # blocks outermost: vLLM then packs caches of different row sizes into one block and keeps our block sizes
        return KVCacheLayout.BLHNC, KVCacheLayout.BLNHC


class WindowBackend(_Backend):
    """Sliding-window rows."""


class CompressedBackend(_Backend):
    """Compressed rows and index keys."""


class OpenGroupBackend(_Backend):
    """Inputs of the group that is not complete yet."""
