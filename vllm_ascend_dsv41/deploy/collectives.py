"""What ranks exchange, tried with values whose sums are exact: over all ranks, and over those of a tensor-parallel and
of a data-parallel group.

``dsv41 selftest`` starts one process for each device of a node. Between nodes, one command on each:

    torchrun --nnodes 2 --node-rank N --nproc-per-node 16 --master-addr NODE0_IP --master-port 29600 \\
        -m vllm_ascend_dsv41.deploy.collectives npu
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
TENSOR_PARALLEL = 8  # of the recipes; fewer ranks are one group
ODD, LARGE = 4099, 8 * 2**20  # elements; 16 MiB in BF16
LIMIT = 180  # seconds for all of it: a rank that does not come must not hold the others for ever


class CollectiveError(RuntimeError):
    """Ranks did not meet, or a rank received other values than were sent."""


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
    dist.init_process_group(BACKENDS[kind], timeout=timedelta(seconds=LIMIT))
    done = 0
    for name, members in _groups(world, TENSOR_PARALLEL).items():
        for ranks in members:
            group = dist.new_group(ranks)  # every rank takes part in the making of every group
            if rank not in ranks:
                continue
            for title, function in _collectives(ranks, device, ODD).items():
                if not function(group):
                    raise CollectiveError(f"{title} over {name} ranks {ranks}: rank {rank} received wrong values")
                done += 1
    large = torch.ones(LARGE, dtype=torch.bfloat16, device=device)
    dist.all_reduce(large)  # the first one also builds what later ones use
    started = time.perf_counter()
    dist.all_reduce(large)
    seconds = float(large[0]) and time.perf_counter() - started  # reading a value waits for the device
    dist.barrier()
    return {"rank": rank, "ranks": world, "collectives": done, "milliseconds": round(1e3 * seconds, 3)}


def run(kind: str, ranks: int) -> str:
    """Start ``ranks`` processes on this machine; what was seen, in words. Raises CollectiveError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    members = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, kind],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = _wait(members)
    finally:
        for member in members:
            member.kill()
            member.wait()
    return (
        f"{ranks} ranks by {BACKENDS[kind]}, {said['collectives']} collectives exact; all-reduce of "
        f"{2 * LARGE // 2**20} MiB {said['milliseconds']} ms"
    )


def _wait(members: list[subprocess.Popen[str]]) -> dict[str, Any]:
    """What rank 0 said once all have ended; the first that fails ends the wait."""
    deadline = time.monotonic() + LIMIT
    while any(member.poll() is None for member in members):
        failed = next((m for m in members if m.poll()), None)
        if failed is not None or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for rank, member in enumerate(members):
        if member.poll():
            lines = (member.stderr.read() if member.stderr else "").strip().splitlines()
            reason = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no message")
            raise CollectiveError(f"rank {rank} of {len(members)} failed: {reason}")
    late = [rank for rank, member in enumerate(members) if member.poll() is None]
    if late:
        raise CollectiveError(f"ranks {late} of {len(members)} did not finish within {LIMIT} s")
    output = members[0].stdout.read() if members[0].stdout else ""
    said: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return said


if __name__ == "__main__":
    print(json.dumps(_member(sys.argv[1])), flush=True)
    os._exit(0)  # process groups take their time to end
