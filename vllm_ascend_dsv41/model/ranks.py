"""Where this rank stands among those that hold Engram tables, from vLLM's groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..engram import Acl, EngramOptions, Peers, Place
from ..upstream import (
    get_dp_group,
    get_engram_dp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_world_group,
)


@dataclass(frozen=True)
class EngramRanks:
    """``divided``: the data-parallel ranks of this node among which hash columns are divided, a vLLM group, or None."""

    device: torch.device
    divided: Any
    data_parallel_rank: int
    place: Place

    @classmethod
    def of(cls, options: EngramOptions, device: torch.device) -> EngramRanks:
        """Columns go to tensor-parallel ranks, and within one of these to data-parallel ranks: what a tensor-parallel
        gather puts together is then in order."""
        group = get_engram_dp_group()  # those of this node; None where there is one, or nobody asked
        divided = group if options.embedding_across_dp else None
        sharing = None if group is None or not options.dp_shared_memory else Peers(group.cpu_group)
        parts = 1 if divided is None else divided.world_size
        shard = get_tensor_model_parallel_rank() * parts + (0 if divided is None else divided.rank_in_group)
        shards = get_tensor_model_parallel_world_size() * parts
        runtime = None if device.type == "cpu" else Acl
        place = Place(device, shard, shards, Peers(get_world_group().cpu_group), sharing, runtime)
        return cls(device, divided, get_dp_group().rank_in_group, place)
