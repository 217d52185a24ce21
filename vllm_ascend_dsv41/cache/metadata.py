"""Where the rows of one step lie: built once per cache kind, read by every layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
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
    slot_mapping: Tensor  # [T] vLLM's slot of each token, in blocks of block_size tokens; -1: padding
    builder: RowMetadataBuilder

    @cached_property
    def slots(self) -> Tensor:
        """[T, 2] int32, block and row that this step's row of each token goes to; a negative block: it has none."""
        block, row = self.builder.place(self)
        return torch.stack((block, row), dim=1).int()


class RowMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Base of the builders: subclasses say which row of its cache a token completes."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size: int = kv_cache_spec.block_size
        self.ratio: int = kv_cache_spec.tokens_per_state
        layers = vllm_config.compilation_config.static_forward_context
        self._wanted = sorted({key for name in layer_names for key in layers[name].plans})
        self._plans: dict[Hashable, Tensor] = {}

    @abstractmethod
    def place(self, metadata: RowMetadata) -> tuple[Tensor, Tensor]:
        """Block and row [T] that each token writes, block -1 for none."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> RowMetadata:
        """vLLM calls this once per step and cache kind."""
        del common_prefix_len, fast_build
        common = common_attn_metadata
        requests = common.num_reqs
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
        return RowMetadata(batch, common.block_table_tensor[:requests], common.slot_mapping[:tokens], self)


class WindowMetadataBuilder(RowMetadataBuilder):
    """One row per token."""

    def place(self, metadata: RowMetadata) -> tuple[Tensor, Tensor]:
        slots = metadata.slot_mapping
        return torch.div(slots, self.block_size, rounding_mode="floor"), slots % self.block_size


class CompressedMetadataBuilder(RowMetadataBuilder):
    """One row per ``ratio`` tokens, written by the last of them. A block holds whole groups."""

    def place(self, metadata: RowMetadata) -> tuple[Tensor, Tensor]:
        slots = metadata.slot_mapping
        block, row = torch.div(slots, self.block_size, rounding_mode="floor"), slots % self.block_size
        if self.ratio == 1:
            return block, row
        complete = slots % self.ratio == self.ratio - 1
        return torch.where(complete, block, -1), torch.div(row, self.ratio, rounding_mode="floor")


class OpenGroupMetadataBuilder(RowMetadataBuilder):
    """A ring of one block per request: only its last ``block_size`` tokens have a place in it."""

    def place(self, metadata: RowMetadata) -> tuple[Tensor, Tensor]:
        batch = metadata.batch
        block = metadata.block_table[:, 0].index_select(0, batch.request)
        # vLLM's slots say which tokens are none: padding, and idle steps, whose table may name a request's ring
        kept = (batch.positions > batch.last - self.block_size) & (metadata.slot_mapping >= 0)
        return torch.where(kept, block, -1), (batch.positions % self.block_size).int()


class _Backend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks of a backend: the model calls ``ops``, so there is no attention implementation."""

    builder: type[RowMetadataBuilder]

    @classmethod
    def get_name(cls) -> str:
        return f"DSV41_{cls.__name__}"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("DeepSeek-V4.1 attention is called by the model itself")

    @classmethod
    def get_builder_cls(cls) -> type[RowMetadataBuilder]:
        return cls.builder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        # blocks outermost: vLLM then packs caches of different row sizes into one block and keeps our block sizes
        return KVCacheLayout.BLHNC, KVCacheLayout.BLNHC


class WindowBackend(_Backend):
    """Sliding-window rows."""

    builder = WindowMetadataBuilder


class CompressedBackend(_Backend):
    """Compressed rows and index keys."""

    builder = CompressedMetadataBuilder


class OpenGroupBackend(_Backend):
    """Inputs of the group that is not complete yet."""

    builder = OpenGroupMetadataBuilder
