"""One of several processes that share Engram tables, for tests: does what it is told and says how that went."""

from __future__ import annotations

import ctypes
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vllm_ascend_dsv41.engram import Acl, EngramOptions, EngramTables, Peers, Place, loader
from vllm_ascend_dsv41.quant import Checkpoint

from .tables import DIM, expected, primes

OPTIONS = EngramOptions(dp_shared_memory=True, chunk_mib=16, load_threads=1)


def member(
    say: Connection,
    rank: int,
    ranks: int,
    meeting: str,
    checkpoint: Checkpoint,
    rows: dict[int, int],
    runtime: str,
    slow: bool,
    refusal: tuple[str, int] | None,
) -> None:
    """Makes the tables, loads them, looks rows up when asked, until told to stop. Sends (step, result)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    group = Peers(dist.group.WORLD)
    place = Place(
        torch.device("cpu"), everyone=group, sharing=group, runtime=_runtime(runtime, refusal) if runtime else None
    )
    if slow and rank == 0:
        loader.SLICE = 1 << 18
        add = loader._Done.add

        def add_slowly(self: Any, size: int) -> None:
            add(self, size)
            say.send(("loading", size))
            time.sleep(0.02)

        loader._Done.add = add_slowly  # type: ignore[method-assign]
    try:
        tables = EngramTables(
            checkpoint, [(layer, primes(count)) for layer, count in rows.items()], DIM, OPTIONS, place
        )
        say.send(("made", shared_files()))
        tables.load()
        say.send(("loaded", tables.report()))
        while say.recv() == "look up":
            equal = []
            for number, (layer, count) in enumerate(rows.items()):
                ids = torch.randint(-3, count + 3, (200, 1))
                equal.append(
                    torch.equal(
                        tables[number].lookup(ids, torch.float32), expected(checkpoint, layer, ids, torch.float32)
                    )
                )
            say.send(("looked up", all(equal)))
        tables.close()
        say.send(("closed", shared_files()))
    except Exception as error:
        say.send(("failed", f"{type(error).__name__}: {error}"))
    finally:
        dist.destroy_process_group()


def shared_files() -> list[str]:
    """Inodes of the shared memory that this process has mapped."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return sorted({part[4] for part in lines if len(part) > 5 and part[5].startswith("/memfd:dsv41")})


def _runtime(path: str, refusal: tuple[str, int] | None) -> Any:
    from contract.conftest import Fake

    from vllm_ascend_dsv41.engram import storage

    os.environ["FAKE_CANN_STRICT_PINNED"] = "1"
    fake = Fake(Path(path))
    fake.library.aclGetRecentErrMsg.restype = ctypes.c_void_p
    fake.library.aclrtSetDevice(0)
    storage.engram_lookup_mapped = fake.look_up  # type: ignore[assignment]
    if refusal is not None:
        fake.inject(refusal[0], 507899, refusal[1])
    return lambda: Acl(path)
