"""Where the rows of one step lie: built once per cache kind, read by every layer."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops import paged_slots
from ..upstream import AttentionBackend, AttentionMetadataBuilder, KVCacheLayout


@dataclass
class RowMetadata:
    """Addresses for one cache. T tokens of R requests; tokens of a request stand together, in order."""

    positions: Tensor  # [T] int64, position of each token in its request
    request: Tensor  # [T] int64, ascending
    query_start: Tensor  # [R + 1] int64, first token of each request
    block_table: Tensor  # [R, blocks] int32
    slots: Tensor  # [T] int64, where this step's row of each token goes; -1: it has none


class RowMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Base of the builders: subclasses say which row of its cache a token completes."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size: int = kv_cache_spec.block_size
        self.ratio: int = kv_cache_spec.tokens_per_state

    @abstractmethod
    def row(self, positions: Tensor, last: Tensor) -> Tensor:
        """Row index that each token writes, -1 for none. ``last``: [T], its request's final position."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> RowMetadata:
        """vLLM calls this once per step and cache kind."""
        del common_prefix_len, fast_build
        common = common_attn_metadata
        start = common.query_start_loc[: common.num_reqs + 1].long()
        length = start[1:] - start[:-1]
        request = torch.repeat_interleave(length, output_size=common.num_actual_tokens)
        last = common.seq_lens[: common.num_reqs].long() - 1
        token = torch.arange(common.num_actual_tokens, device=start.device)
        positions = token - (start[1:] - 1 - last)[request]
        block_table = common.block_table_tensor[: common.num_reqs]
        per_block = self.block_size // self.ratio
        slots = paged_slots(block_table, request, self.row(positions, last[request]), per_block)
        return RowMetadata(positions, request, start, block_table, slots)


class WindowMetadataBuilder(RowMetadataBuilder):
    """One row per token."""

    def row(self, positions: Tensor, last: Tensor) -> Tensor:
        return positions


class CompressedMetadataBuilder(RowMetadataBuilder):
    """One row per ``ratio`` tokens, written by the last of them."""

    def row(self, positions: Tensor, last: Tensor) -> Tensor:
        complete = (positions + 1) % self.ratio == 0
        return torch.where(complete, positions // self.ratio, -1)


class OpenGroupMetadataBuilder(RowMetadataBuilder):
    """A ring of one block per request: only its last ``block_size`` tokens have a place in it."""

    def row(self, positions: Tensor, last: Tensor) -> Tensor:
        return torch.where(positions > last - self.block_size, positions % self.block_size, -1)


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
