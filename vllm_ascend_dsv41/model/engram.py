"""The Engram of one layer: table rows in, gated values added to the streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..engram import EngramTables, Pending, Prefetcher, TableShard
from ..ops import engram_inject
from ..upstream import (
    ColumnParallelLinear,
    get_forward_context,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from .parameters import empty
from .ranks import EngramRanks
from .step import Step


class EngramReader:
    """Looks the rows of all Engram layers up. Each rank has whole hash columns; their rows are gathered.

    ``dtype``: of the rows; ``shard``: columns of this rank, the same in every layer.
    """

    def __init__(
        self, tables: EngramTables, shard: TableShard, ranks: EngramRanks, dtype: torch.dtype, prefetch: bool
    ) -> None:
        self._tables, self._ranks, self._dtype = tables, ranks, dtype
        self._own = slice(shard.first_column, shard.first_column + shard.columns)
        self._prefetcher = Prefetcher(ranks.device, prefetch)

    def start(self, rows: Tensor) -> list[Pending]:
        """rows [layers, T, columns] int64, -1 throughout for tokens that look nothing up -> a look-up per layer.

        Where columns are divided among data-parallel ranks, each looks up for the tokens of all: every rank must come
        here in every step, also one without requests.
        """
        layers, _, columns = rows.shape
        if self._ranks.divided is not None:
            flat = rows.transpose(0, 1).flatten(1).contiguous()
            flat = self._ranks.divided.all_gatherv(flat, 0, self._tokens())
            rows = flat.view(-1, layers, columns).transpose(0, 1)
        return [self._start_layer(number, rows[number, :, self._own]) for number in range(layers)]

    def _start_layer(self, number: int, own: Tensor) -> Pending:
        return self._prefetcher.start(lambda: self._tables[number].lookup(own, self._dtype))

    def finish(self, pending: Pending) -> Tensor:
        """[T, columns, dim], for the tokens of this rank."""
        values = pending.wait()
        divided = self._ranks.divided
        if divided is not None:
            tokens, rank = self._tokens(), divided.rank_in_group
            first = sum(tokens[:rank])
            values = divided.all_gather(values.contiguous(), dim=1)[first : first + tokens[rank]]
        if get_tensor_model_parallel_world_size() > 1:
            values = tensor_model_parallel_all_gather(values.contiguous(), dim=1)
        return values

    def _tokens(self) -> list[int]:
        """Of each data-parallel rank that shares the division, in this step."""
        divided = self._ranks.divided
        every: list[int] = get_forward_context().dp_metadata.num_tokens_across_dp_cpu.tolist()
        first = self._ranks.data_parallel_rank // divided.world_size * divided.world_size
        return every[first : first + divided.world_size]


class Engram(nn.Module):
    """Projects the rows of one layer and adds them to the streams.

    ``index``: which of the Engram layers; ``columns``: of its hash; ``rotation``: block of the checkpoint's rotation
    [32, 32], None when it has none. Source: spec section 3.9.
    """

    rotation: Tensor | None

    def __init__(
        self, config: Any, index: int, columns: int, reader: EngramReader, rotation: Tensor | None, quant: Any, prefix: str
    ) -> None:
        super().__init__()
        self.register_buffer("rotation", rotation, persistent=False)
        self.index, self.reader, self.eps = index, reader, config.rms_norm_eps
        self.wkv = ColumnParallelLinear(
            columns * config.engram_head_dim,
            (config.hc_mult + 1) * config.hidden_size,
            bias=False,
            gather_output=True,
            quant_config=quant,
            prefix=f"{prefix}.wkv",
            return_bias=False,
        )
        self.q_weight, self.k_weight = (empty(config.hc_mult, config.hidden_size) for _ in range(2))

    def forward(self, streams: Tensor, step: Step) -> Tensor:
        """streams [T, hc, D] -> the same."""
        values = self.reader.finish(step.engram[self.index])
        kv = self.wkv(values.flatten(1))
        return engram_inject(streams, kv, self.q_weight * self.k_weight, step.dead, self.eps, self.rotation)
