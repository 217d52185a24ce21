"""Which rows of an Engram table a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


class EngramShardError(ValueError):
    """The hash columns cannot be divided among the ranks."""


def check_columns(columns: int, ranks: int) -> None:
    """Raise EngramShardError unless ``columns`` hash columns can be divided among ``ranks``."""
    if columns % ranks:
        raise EngramShardError(
            f"{columns} Engram hash columns cannot be divided among {ranks} ranks; choose a --tensor-parallel-size "
            f"that divides {columns}, or, where data-parallel ranks divide them too (embedding_across_dp), let them "
            "share one copy instead: --engram-config '{\"dp_shared_memory\": true}'"
        )


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
        """Shard ``rank`` of ``ranks``; primes: bucket counts of one layer, any shape. Raises EngramShardError."""
        sizes = primes.flatten().tolist()
        check_columns(len(sizes), ranks)
        columns = len(sizes) // ranks
        first = rank * columns
        return cls(first, columns, sum(sizes[:first]), sum(sizes[first : first + columns]), dim)
