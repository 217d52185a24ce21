"""Attention over the sliding window and the selected compressed rows."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ..cache import CompressedCache, WindowCache
from ..layer_plan import LayerPlan
from ..ops import Rotation, apply_rope, grouped_linear, sparse_attention, store_latents
from ..quantization.linear import Quantized, takes_codes
from ..upstream import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from .compressor import Compressor
from .indexer import Indexer
from .parameters import Norm, QuantizingNorm, copy_into, empty
from .step import Step


class TensorParallelError(ValueError):
    """A tensor-parallel size that does not divide what must be divided."""


class Attention(nn.Module):
    """Multi-query attention, keys equal to values; heads and output groups are split among ranks.

    ``sources``: the compressors of earlier KV sources by layer; this layer adds its own.
    Source: spec section 3.3.
    """

    def __init__(
        self,
        config: Any,
        plan: LayerPlan,
        sources: dict[int, Compressor],
        dtype: torch.dtype,
        quant_config: Any,
        prefix: str,
    ) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        if config.o_groups % ranks or config.num_attention_heads % ranks:
            raise TensorParallelError(
                f"--tensor-parallel-size {ranks} must divide o_groups = {config.o_groups} and "
                f"num_attention_heads = {config.num_attention_heads}"
            )
        self.heads, self.groups = config.num_attention_heads // ranks, config.o_groups // ranks
        self.head_dim, self.window_size = config.head_dim, config.sliding_window
        self.q_rank, self.low_rank = config.q_lora_rank, config.o_lora_rank
        self.scale = config.head_dim**-0.5
        self.compressed = plan.ratio > 0

        def linear(kind: Any, rows: int, columns: int, name: str) -> Any:
            return kind(
                rows, columns, bias=False, quant_config=quant_config, prefix=f"{prefix}.{name}", return_bias=False
            )

        width = config.num_attention_heads * config.head_dim
        self.wqa_wkv = MergedColumnParallelLinear(
            config.hidden_size,
            [config.q_lora_rank, config.head_dim],
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.wqa_wkv",
            return_bias=False,
            disable_tp=True,
        )
        self.kv_norm = Norm(config.head_dim, config.rms_norm_eps)
        self.wq_b = linear(ColumnParallelLinear, config.q_lora_rank, width, "wq_b")
        self.wo_a = linear(ColumnParallelLinear, width // config.o_groups, config.o_groups * config.o_lora_rank, "wo_a")
        self.wo_b = linear(RowParallelLinear, config.o_groups * config.o_lora_rank, config.hidden_size, "wo_b")
        self.attn_sink = empty(self.heads)
        self.attn_sink.weight_loader = self._load_sink  # type: ignore[attr-defined]

        self.window = WindowCache(f"{prefix}.window", config.head_dim, dtype, config.sliding_window)
        self.compressor = Compressor(config, plan, dtype, f"{prefix}.compressor") if plan.is_kv_source else None
        if self.compressor is not None:
            sources[plan.index] = self.compressor
        self._rows: list[CompressedCache] = []  # in a list: the rows belong to their source's module
        self.indexer = None
        arguments = (self.heads, config.head_dim, config.sliding_window)
        if plan.kv_source is None:
            self._plan_window(arguments)
        else:
            source = sources[plan.kv_source]
            self._rows.append(source.rows)
            source.rows.plans.add(("attention", *arguments, plan.ratio, config.index_topk))
            if plan.is_index_source:
                self.indexer = Indexer(config, plan, source.keys, dtype, quant_config, f"{prefix}.indexer")
        readers = [self.wq_b] if self.indexer is None else [self.wq_b, self.indexer.wq_b]
        self.q_norm = (QuantizingNorm if takes_codes(*readers) else Norm)(config.q_lora_rank, config.rms_norm_eps)
        #: Whether the input may be ``Quantized``: compressor and indexer read it as it is.
        self.input_quantized = self.compressor is None and self.indexer is None and takes_codes(self.wqa_wkv)

    def _plan_window(self, arguments: tuple[int, int, int]) -> None:
        """Attention over the window alone: what its kernel works out once per step."""
        self.window.plans.add(("attention", *arguments, 0, 0))

    def _load_sink(self, parameter: Tensor, value: Tensor) -> None:
        first = get_tensor_model_parallel_rank() * self.heads
        copy_into(parameter, value[first : first + self.heads])

    def project(self, x: Tensor | Quantized) -> tuple[Tensor, Tensor]:
        """x [T, D] -> low-rank queries [T, q_lora_rank] and rows [T, head_dim], keys and values in one, both before
        their norms."""
        qr, kv = self.wqa_wkv(x).split([self.q_rank, self.head_dim], dim=-1)
        return qr, kv

    def store(self, q: Tensor | None, kv: Tensor, rope: Rotation, cache: Tensor, slots: Tensor | None) -> Any:
        """Rows [T, head_dim] go normalised and turned into a cache; queries [T, heads, head_dim] come back turned."""
        return store_latents(q, kv, self.kv_norm.weight, self.kv_norm.eps, rope, cache, slots)

    def forward(self, x: Any, step: Step) -> Tensor:
        """x [T, D], or ``Quantized`` where ``input_quantized`` -> [T, D]. All rows of the step are written before any
        is read: a request may hit blocks that another one fills in the same step."""
        rope = step.rope(self.compressed)
        qr, kv = self.project(x)
        qr = self.q_norm(qr)
        q = self.wq_b(qr).unflatten(-1, (self.heads, self.head_dim))
        if self.compressor is not None:
            self.compressor(x, step)
        if self.indexer is not None:
            self.indexer(x, qr, step)
        mixed = q if step.metadata is None else self._attend(q, kv, rope, step, step.metadata)
        groups = apply_rope(mixed, rope, inverse=True).flatten(1).unflatten(1, (self.groups, -1))
        return self.wo_b(grouped_linear(groups, self._wo_a()))

    def _wo_a(self) -> Tensor:
        """[groups, low_rank, in], as the operator packed it once."""
        weight = self.wo_a.weight
        return weight if weight.dim() == 3 else weight.unflatten(0, (self.groups, self.low_rank))

    def after_loading(self) -> None:
        """Bring ``wo_a`` into the layout that its operator reads: once."""
        if self.wo_a.weight.dim() == 2:
            self.wo_a.weight.data = grouped_linear.pack(1, self._wo_a().data)

    def _attend(self, q: Tensor, kv: Tensor, rope: Rotation, step: Step, metadata: dict[str, Any]) -> Tensor:
        own = metadata[self.window.prefix]
        q = self.store(q, kv, rope, self.window.kv_cache, own.slot_mapping)
        batch, compressed = own.batch, cast("tuple[Any, ...]", ())
        if self._rows:
            rows = self._rows[0]
            meta = metadata[rows.prefix]
            batch, compressed = meta.batch, (rows.kv_cache, meta.block_table, step.selected, rows.ratio)
        return sparse_attention(
            q,
            batch,
            self.window.kv_cache,
            own.block_table,
            self.window_size,
            self.attn_sink,
            self.scale,
            *compressed,
        )
