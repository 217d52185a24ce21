"""Collectives of unequal sizes on CPU, which upstream's communicator lacks and MoE under DP calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..upstream import CpuCommunicator as UpstreamCpuCommunicator


class CpuCommunicator(UpstreamCpuCommunicator):  # type: ignore[misc]
    """Gloo, through padding to the largest rank."""

    def all_gatherv(self, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        """Concatenate every rank's rows along dimension 0; ``sizes``: rows of each rank."""
        if isinstance(input_, (list, tuple)):
            return [self.all_gatherv(item, dim, sizes) for item in input_]
        if dim != 0:
            raise ValueError(f"all_gatherv along dimension {dim}; only 0 is used")
        counts = sizes or [len(input_)] * self.world_size
        padded = input_.new_zeros((max(counts), *input_.shape[1:]))
        padded[: len(input_)] = input_
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded, group=self.device_group)
        return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])

    def reduce_scatterv(self, input_: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
        """Sum over ranks, then keep this rank's rows of dimension 0 (-1: unspecified, vLLM means 0)."""
        if dim not in (-1, 0):
            raise ValueError(f"reduce_scatterv along dimension {dim}; only 0 is used")
        total = input_.clone()
        dist.all_reduce(total, group=self.device_group)
        counts = sizes or [len(total) // self.world_size] * self.world_size
        first = sum(counts[: self.rank_in_group])
        return total[first : first + counts[self.rank_in_group]].contiguous()
