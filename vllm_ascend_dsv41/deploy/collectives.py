"""What ranks exchange, tried with values whose sums are exact: over all ranks, and over those of a tensor-parallel and
of a data-parallel group.

``dsv41 selftest`` starts one process for each device of a node. Between nodes, one command on each:

    torchrun --nnodes 2 --node-rank N --nproc-per-node 16 --master-addr NODE0_IP --master-port 29600 \\
        -m vllm_ascend_dsv41.deploy.collectives npu
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .members import RESULT, run_members, scratch
from .server import free_port

BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
TENSOR_PARALLEL = 8  # of the recipes; fewer ranks are one group
ODD, LARGE = 4099, 8 * 2**20  # elements; 16 MiB in BF16
LIMIT, PATIENCE = 300, 120  # seconds for all of it; and how long a rank waits for one that does not come


class CollectiveError(RuntimeError):
    """A rank received other values than were sent, or there cannot be so many ranks."""


def _pattern(rank: int, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """0 and 1, another sequence for each rank: sums of 256 ranks are exact in BF16."""
    return ((torch.arange(size) // (rank + 1) + rank) % 2).to(dtype).to(device)


def _collectives(ranks: list[int], device: torch.device, size: int) -> dict[str, Callable[[Any], bool]]:
    """By name, a function of the process group that says whether this rank received what was sent."""
    import torch.distributed as dist

    me = ranks.index(dist.get_rank())
    sent = {r: _pattern(r, size, device, torch.bfloat16) for r in ranks}
    total = torch.stack(list(sent.values())).float().sum(0)

    def all_reduce(group: Any) -> bool:
        x = sent[ranks[me]].clone()
        dist.all_reduce(x, group=group)
        return torch.equal(x.float(), total)

    def all_gather(group: Any) -> bool:
        out = torch.empty(len(ranks) * size, dtype=torch.bfloat16, device=device)
        dist.all_gather_into_tensor(out, sent[ranks[me]], group=group)
        return torch.equal(out, torch.cat(list(sent.values())))

    def reduce_scatter(group: Any) -> bool:
        out = torch.empty(size, dtype=torch.bfloat16, device=device)
        mine = torch.cat([sent[ranks[me]].roll(part) for part in range(len(ranks))])
        dist.reduce_scatter_tensor(out, mine, group=group)
        return torch.equal(out.float(), total.roll(me))

    def all_to_all(group: Any) -> bool:
        mine = torch.cat([sent[ranks[me]] * (to + 1) for to in range(len(ranks))])
        out = torch.empty_like(mine)
        dist.all_to_all_single(out, mine, group=group)
        return torch.equal(out, torch.cat([x * (me + 1) for x in sent.values()]))

    def broadcast(group: Any) -> bool:
        x = sent[ranks[me]].clone()
        dist.broadcast(x, ranks[-1], group=group)
        return torch.equal(x, sent[ranks[-1]])

    own = (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast)
    return {function.__name__: function for function in own}


def _groups(world: int, parallel: int) -> dict[str, list[list[int]]]:
    """Ranks of every group by kind: vLLM numbers tensor-parallel ranks first."""
    every = {"all": [list(range(world))]}
    if 1 < parallel < world and world % parallel == 0:
        every["tensor-parallel"] = [list(range(i, i + parallel)) for i in range(0, world, parallel)]
        every["data-parallel"] = [list(range(i, world, parallel)) for i in range(parallel)]
    return every


def _member(kind: str) -> dict[str, Any]:
    """One rank's part, with the variables of torchrun. Raises CollectiveError for a wrong result."""
    import torch.distributed as dist

    if kind == "npu":
        import torch_npu  # noqa: F401  registers the device and HCCL
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, int(os.environ.get("LOCAL_RANK", rank)))
    if kind != "cpu":
        torch.get_device_module(kind).set_device(device)
    dist.init_process_group(BACKENDS[kind], timeout=timedelta(seconds=PATIENCE))
    done = 0
    for name, members in _groups(world, TENSOR_PARALLEL).items():
        for ranks in members:
            # every rank takes part in the making of every group; a group does not inherit the first one's patience
            group = dist.new_group(ranks, timeout=timedelta(seconds=PATIENCE))
            if rank not in ranks:
                continue
            for title, function in _collectives(ranks, device, ODD).items():
                print(f"rank {rank}: {title} over {name} ranks {ranks}", flush=True)
                if not function(group):
                    raise CollectiveError(f"{title} over {name} ranks {ranks}: rank {rank} received wrong values")
                done += 1
    large = torch.ones(LARGE, dtype=torch.bfloat16, device=device)
    dist.all_reduce(large)  # the first one also builds what later ones use
    float(large.fill_(1)[0])  # reading a value waits for the device
    started = time.perf_counter()
    dist.all_reduce(large)
    arrived = float(large[0])
    seconds = time.perf_counter() - started
    if arrived != world or not bool((large == world).all()):
        raise CollectiveError(f"all_reduce of {2 * LARGE // 2**20} MiB: rank {rank} received wrong values")
    dist.barrier()
    return {"rank": rank, "ranks": world, "collectives": done, "milliseconds": round(1e3 * seconds, 3)}


def run(kind: str, ranks: int) -> str:
    """Start ``ranks`` processes on this machine, one for each device (0: for all of them, on a CPU two); what was seen,
    in words. Raises CollectiveError, MemberError."""
    if kind not in BACKENDS:
        raise CollectiveError(f"no backend is known for {kind}; there are {', '.join(BACKENDS)}")
    devices = 2 if kind == "cpu" else torch.get_device_module(kind).device_count()
    if kind != "cpu" and ranks > devices:
        raise CollectiveError(f"--ranks {ranks}: {devices} devices are visible here")
    ranks = ranks or devices
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    own = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    with scratch() as directory:
        said = json.loads(run_members(__name__, [kind], own, directory, LIMIT))
    groups = ", ".join(f"{len(members)} of {len(members[0])}" for members in _groups(ranks, TENSOR_PARALLEL).values())
    return (
        f"{ranks} ranks by {BACKENDS[kind]} in groups: {groups}; {said['collectives']} collectives of rank 0 exact; "
        f"all-reduce of {2 * LARGE // 2**20} MiB {said['milliseconds']} ms"
    )


def main() -> None:
    """One rank: writes what it saw where it was asked to, else to standard output."""
    said = json.dumps(_member(sys.argv[1]))
    if RESULT in os.environ:
        Path(os.environ[RESULT]).write_text(said, encoding="utf-8")
    else:
        print(said)
    sys.stdout.flush()
    os._exit(0)  # process groups take their time to end


if __name__ == "__main__":
    main()
