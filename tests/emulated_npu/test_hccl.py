"""Collectives between two processes, and what happens when they do not fit together."""

import os
import socket
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.long, pytest.mark.emulated_npu(devices=2)]

PROGRAM = """
import os, sys, torch, torch_npu, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")
def f(*values, dtype=torch.float32): return torch.tensor(values, dtype=dtype, device="npu")
{body}
sys.stdout.flush()
os._exit(0)
"""


def ranks(body, timeout=60):
    """Runs the body on two ranks -> [(return code, output), ...]."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "FAKE_HCCL_TIMEOUT": "20"}
    command = [sys.executable, "-c", PROGRAM.format(body=body)]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **common, "RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(2)
    ]
    return [(p.returncode, text) for p, text in ((p, p.communicate(timeout=timeout)[0]) for p in processes)]


def test_every_collective():
    body = """
x = torch.arange(6, dtype=torch.bfloat16, device="npu") + rank
dist.all_reduce(x)
assert x.tolist() == [1, 3, 5, 7, 9, 11]
i = f(2**60 + 1 - rank, 2**31 - 1, dtype=torch.int64)
dist.all_reduce(i)
assert i.tolist() == [2**61 + 1, 2**32 - 2]
m = f(1.0, float("nan") if rank else 2.0)
dist.all_reduce(m, dist.ReduceOp.MAX)
assert m[0] == 1 and m[1].isnan()
g = [torch.empty(2, device="npu") for _ in range(2)]
dist.all_gather(g, f(rank, rank))
assert [t.tolist() for t in g] == [[0, 0], [1, 1]]
o = torch.empty(4, device="npu")
dist.all_gather_into_tensor(o, f(rank + 5, rank))
assert o.tolist() == [5, 0, 6, 1]
s = torch.empty(2, device="npu")
dist.reduce_scatter_tensor(s, torch.arange(4.0, device="npu") * (rank + 1))
assert s.tolist() == ([0, 3] if rank == 0 else [6, 9])
b = f(rank + 7.0)
dist.broadcast(b, 0)
assert b.tolist() == [7]
sent = torch.arange(4.0, device="npu") + 10 * rank
a = torch.empty(4, device="npu")
dist.all_to_all_single(a, sent)
assert a.tolist() == ([0, 1, 10, 11] if rank == 0 else [2, 3, 12, 13])
u = torch.empty(3 if rank == 0 else 1, device="npu")
dist.all_to_all_single(u, sent[:2].clone(), [1, 2] if rank == 0 else [1, 0], [1, 1] if rank == 0 else [2, 0])
assert u.tolist() == ([0, 10, 11] if rank == 0 else [1])
dist.barrier()
print("fine")
"""
    for code, text in ranks(body):
        assert code == 0, text
        assert "fine" in text


@pytest.mark.parametrize(
    "body",
    [
        "x = torch.zeros(4 if rank else 2, device='npu'); dist.broadcast(x, 0); torch.npu.synchronize()",
        "x = torch.zeros(4 if rank else 2, device='npu'); dist.all_reduce(x); torch.npu.synchronize()",
        "x = torch.zeros(2, dtype=torch.int32 if rank else torch.float32, device='npu'); dist.all_reduce(x)",
        "x = torch.zeros(2, device='npu'); dist.all_reduce(x) if rank else dist.broadcast(x, 0)",
    ],
    ids=["broadcast counts", "counts", "dtypes", "different collectives"],
)
def test_collectives_that_do_not_fit(body):
    results = ranks(body)
    assert all(code not in (0, -11) for code, _ in results), results
    assert any("mismatch: rank" in text for _, text in results)


def test_a_dead_rank_is_noticed():
    """Also while its parent has not looked: rank 0 is waited for first."""
    body = "dist.all_reduce(f(1.0))\nif rank: os.kill(os.getpid(), 9)\ndist.all_reduce(f(1.0)); torch.npu.synchronize()"
    code, text = ranks(body)[0]
    assert code != 0
    assert "a rank of the communicator has died" in text


def test_nothing_is_left_behind():
    ranks("dist.all_reduce(f(1.0))")
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("fake_hccl")]
