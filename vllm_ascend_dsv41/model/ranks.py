"""Where this rank stands among those that hold Engram tables, from vLLM's groups."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..engram import Acl, EngramOptions, Peers, Place
from ..upstream import (
    get_dp_group,
    get_engram_dp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_world_group,
    init_logger,
)

logger = init_logger("vllm.dsv41")
#: Ranks wait for each other while one reads up to 100 GB, from storage of any speed. One that ends is noticed at once.
PATIENCE = timedelta(hours=6)


@dataclass(frozen=True)
class EngramRanks:
    """``divided``: the data-parallel ranks of this node among which hash columns are divided, a vLLM group, or None."""

    divided: Any
    data_parallel_rank: int
    place: Place

    @classmethod
    def of(cls, options: EngramOptions, device: torch.device) -> EngramRanks:
        """Columns go to tensor-parallel ranks, and within one of these to data-parallel ranks: what a tensor-parallel
        gather puts together is then in order."""
        group = get_engram_dp_group()  # those of this node
        if group is None and (options.dp_shared_memory or options.embedding_across_dp):
            logger.warning(
                "Engram: vLLM finds no other data-parallel rank on this node, or ranks of unequal nodes: nothing is "
                "shared or divided among them, and each has tables of its own"
            )
        divided = group if options.embedding_across_dp else None
        sharing = None if group is None or not options.dp_shared_memory else Peers(group.cpu_group)
        parts = 1 if divided is None else divided.world_size
        shard = get_tensor_model_parallel_rank() * parts + (0 if divided is None else divided.rank_in_group)
        shards = get_tensor_model_parallel_world_size() * parts
        runtime = None if device.type == "cpu" else Acl
        place = Place(device, shard, shards, _everyone(), sharing, runtime)
        return cls(divided, get_dp_group().rank_in_group, place)


def _everyone() -> Peers:
    """All ranks, in a group of their own: vLLM's gives up after half an hour."""
    world = get_world_group()
    if world.world_size == 1:
        return Peers()
    return Peers(dist.new_group(world.ranks, timeout=PATIENCE, backend="gloo"))
