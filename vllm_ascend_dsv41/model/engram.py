"""The Engram of one layer: table rows in, gated values added to the streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..engram import HostTable, TableShard
from ..ops import engram_inject
from ..upstream import (
    ColumnParallelLinear,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from .parameters import empty
from .step import Step


class Engram(nn.Module):
    """Each rank owns whole hash columns of the table; their rows are gathered before the projection.

    ``primes``: bucket counts of this layer's hash functions; ``int8``: format of the checkpoint's
    table; ``rotation``: block of the checkpoint's rotation [32, 32], None when it has none. Source: spec section 3.9.
    """

    rotation: Tensor | None

    def __init__(
        self,
        config: Any,
        index: int,
        primes: Tensor,
        int8: bool,
        rotation: Tensor | None,
        dtype: torch.dtype,
        quant_config: Any,
        prefix: str,
    ) -> None:
        super().__init__()
        self.register_buffer("rotation", rotation, persistent=False)
        self.index, self.dtype, self.eps = index, dtype, config.rms_norm_eps
        self.ranks = get_tensor_model_parallel_world_size()
        dim, hc = config.engram_head_dim, config.hc_mult
        shard = TableShard.of(primes, dim, get_tensor_model_parallel_rank(), self.ranks)
        self.table = HostTable(shard, torch.int8, dim // 32) if int8 else HostTable(shard, torch.bfloat16)
        self.wkv = ColumnParallelLinear(
            primes.numel() * dim,
            (hc + 1) * config.hidden_size,
            bias=False,
            gather_output=True,
            quant_config=quant_config,
            prefix=f"{prefix}.wkv",
            return_bias=False,
        )
        self.q_weight, self.k_weight = empty(hc, config.hidden_size), empty(hc, config.hidden_size)

    def forward(self, streams: Tensor, step: Step) -> Tensor:
        """streams [T, hc, D] -> the same."""
        if step.engram_rows is None:  # a dummy run: no ids to look up, but the memory of the projection
            columns = self.table.shard.columns * self.ranks
            values = streams.new_zeros(len(streams), columns, self.table.shard.dim)
        else:
            shard = self.table.shard
            own = step.engram_rows[self.index, :, shard.first_column : shard.first_column + shard.columns]
            values = self.table.lookup(own, self.dtype)
            if self.ranks > 1:
                values = tensor_model_parallel_all_gather(values.contiguous(), dim=1)
        kv = self.wkv(values.flatten(1))
        return engram_inject(streams, kv, self.q_weight * self.k_weight, step.dead, self.eps, self.rotation)
