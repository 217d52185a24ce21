"""Where an Engram table lives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import engram_lookup


@dataclass(frozen=True)
class TableShard:
    """The part of a table that one rank owns: whole hash columns, hence neighbouring rows."""

    first_column: int
    columns: int
    first_row: int
    rows: int
    dim: int

    @classmethod
    def of(cls, primes: Tensor, dim: int, rank: int, ranks: int) -> TableShard:
        """Shard ``rank`` of ``ranks``; primes: bucket counts of one layer, any shape. Raises ValueError."""
        sizes = primes.flatten().tolist()
        if len(sizes) % ranks:
            raise ValueError(
                f"{len(sizes)} Engram hash columns cannot be divided among {ranks} ranks; "
                "use a tensor-parallel size that divides them"
            )
        columns = len(sizes) // ranks
        first = rank * columns
        return cls(first, columns, sum(sizes[:first]), sum(sizes[first : first + columns]), dim)


class HostTable:
    """Rows in plain host memory, zero until loaded.

    ``codes`` [rows, dim] int8 with ``scale`` [rows, groups] float32, or BF16 without scale.
    """

    def __init__(self, shard: TableShard, dtype: torch.dtype, groups: int = 0) -> None:
        self.shard = shard
        self.codes = torch.zeros(shard.rows, shard.dim, dtype=dtype)
        self.scale = torch.zeros(shard.rows, groups, dtype=torch.float32) if groups else None

    def lookup(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Table rows [T, columns] int64, of this shard's columns -> [T, columns, dim] in ``dtype``."""
        return engram_lookup(self.codes, self.scale, rows - self.shard.first_row, dtype)
