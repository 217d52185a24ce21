"""The caches that layers own, as vLLM's key-value cache manager sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..upstream import (
    AttentionLayerBase,
    CircularBufferSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_current_vllm_config,
)
from .metadata import CompressedBackend, OpenGroupBackend, WindowBackend, _Backend

SCALE_BYTES = 2
OPEN_GROUP_ROWS = 8  # the capacity of a ring is a multiple of this


@dataclass(frozen=True, kw_only=True)
class OpenGroupSpec(CircularBufferSpec):  # type: ignore[misc, valid-type]
    """A ring of one block per request, with a block-table row as wide as vLLM's kernels index it.

    vLLM computes token slots for every group and looks at column ``position / block_size``; with
    upstream's width of 1 that reads beyond the row.
    """

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        del vllm_config
        return -(-max_len // self.block_size)


class PagedCache(nn.Module, AttentionLayerBase):  # type: ignore[misc, valid-type]
    """One cache of one layer: ``kv_cache`` is [blocks, rows per block, width], strided over the blocks."""

    backend: type[_Backend]

    def __init__(self, prefix: str, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.prefix, self.width, self.dtype = prefix, width, dtype
        self.kv_cache = torch.empty(0)
        self.plans: set[tuple[Any, ...]] = set()  # what kernels that read it work out once per step (``ops.plan``)
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"two caches are named {prefix}")
        layers[prefix] = self

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """vLLM hands over [blocks, 1, rows, width]."""
        self.kv_cache = kv_cache.squeeze(1)

    def get_attn_backend(self) -> type[_Backend]:
        """The backend whose builder addresses this cache."""
        return self.backend


class WindowCache(PagedCache):
    """Rows of the last ``window`` tokens."""

    backend = WindowBackend

    def __init__(self, prefix: str, width: int, dtype: torch.dtype, window: int) -> None:
        super().__init__(prefix, width, dtype)
        self.window = window

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """One row per token; blocks that slid out of the window are freed. Not vLLM's spec for latent rows: by that
        vllm-ascend knows DeepSeek-V4 and plans its layout."""
        return SlidingWindowSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.width,
            head_size_v=0,
            dtype=self.dtype,
            sliding_window=self.window,
        )


class CompressedCache(PagedCache):
    """Rows of ``ratio`` tokens each, kept for the whole sequence: compressed rows or index keys."""

    backend = CompressedBackend

    def __init__(self, prefix: str, width: int, dtype: torch.dtype, ratio: int) -> None:
        super().__init__(prefix, width, dtype)
        self.ratio = ratio

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """One row per ``ratio`` tokens."""
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.width,
            dtype=self.dtype,
            tokens_per_state=self.ratio,
        )


class IndexKeyCache(CompressedCache):
    """Index keys: in the model's dtype, or as INT8 with an FP16 scale behind the codes of each block."""

    def __init__(self, prefix: str, width: int, dtype: torch.dtype, ratio: int, quantized: bool) -> None:
        super().__init__(prefix, width + SCALE_BYTES if quantized else width, torch.int8 if quantized else dtype, ratio)
        self.quantized = quantized
        self.key_scale: Tensor | None = None

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Sets ``kv_cache`` and, for INT8 keys, ``key_scale`` [blocks, rows] float16."""
        super().bind_kv_cache(kv_cache)
        if self.quantized:
            rows, width = self.kv_cache.shape[1], self.kv_cache.shape[2] - SCALE_BYTES
            page = self.kv_cache.flatten(1)
            self.kv_cache = page[:, : rows * width].unflatten(1, (rows, width))
            self.key_scale = page[:, rows * width :].view(torch.float16)


class OpenGroupCache(PagedCache):
    """Compressor inputs of the last tokens, in float32: a request's own, never shared by prefix.

    All tokens of a step that verifies drafts have a place, so that the row in front of the next step is there however
    many of them are accepted.
    """

    backend = OpenGroupBackend

    def __init__(self, prefix: str, width: int) -> None:
        super().__init__(prefix, width, torch.float32)

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """One ring per request."""
        tokens = 1 + vllm_config.num_speculative_tokens
        rows = -(-tokens // OPEN_GROUP_ROWS) * OPEN_GROUP_ROWS
        return OpenGroupSpec(block_size=rows, num_kv_heads=1, head_size=self.width, head_size_v=0, dtype=self.dtype)
