"""Whether the device really reads host memory: two megabytes of it, before hundreds of gigabytes are registered."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from . import limits
from .acl import Acl
from .memory import HUGE_PAGE, HostMemory, PinnedMemory, PrivateMemory, give_back, take
from .sharding import TableShard
from .storage import RegisteredTable, part_bytes

DIM, GROUPS, ROWS = 256, 8, 8192  # 2 MiB of codes
STEP = 16  # rows on a page of 4 KiB
Allocate = Callable[[int, int], HostMemory]
"""(bytes, bytes of a block) -> memory of the kind that the tables will have."""


class HostReadError(RuntimeError):
    """The device reads something else than the host wrote."""


def private_memory(size: int, block: int, acl: Acl | None) -> HostMemory:
    """A process's own memory, of the kind that this kernel lets CANN register (``acl`` None: none is)."""
    if acl is not None and not limits.maps_anonymous_memory():
        return PinnedMemory(size, block, acl)
    return PrivateMemory(size, block)


def probe(acl: Acl, device: torch.device, allocate: Allocate) -> None:
    """Register a small table, look a row of every page up on the device and compare. Raises AclError, HostReadError."""
    random = np.random.default_rng(41)
    content = {
        "weight": random.integers(0, 256, ROWS * DIM, dtype=np.uint8),
        "scale": np.exp2(random.integers(-8, 8, ROWS * GROUPS)).astype(np.float32).view(np.uint8),
    }
    sizes = part_bytes(DIM, GROUPS)
    # models are made where new tensors are the device's unless they say otherwise: these are the host's
    memory = take(sizes, lambda part: allocate(ROWS * sizes[part], HUGE_PAGE))
    table = RegisteredTable(TableShard(0, 1, 0, ROWS, DIM), GROUPS, memory, acl, device)
    try:
        for part, values in content.items():
            for offset, place in table.spans(part):
                place[:] = values[offset : offset + len(place)]
        table.open()
        rows = torch.from_numpy(np.concatenate([[-1, ROWS - 1, ROWS], np.arange(0, ROWS, STEP)]))
        found = table.lookup(rows[:, None].to(device), torch.float32).cpu()[:, 0]
        acl.synchronize()
    finally:
        give_back(table)
    codes, scale = (torch.from_numpy(part) for part in content.values())
    dequantised = codes.view(torch.int8).view(ROWS, GROUPS, -1).float() * scale.view(torch.float32).view(
        ROWS, GROUPS, 1
    )
    padded = torch.cat([dequantised.flatten(1), torch.zeros(1, DIM, device="cpu")])  # of ids outside the table: zeros
    expected = padded[torch.where((rows >= 0) & (rows < ROWS), rows, ROWS)]
    wrong = (found != expected).any(1).nonzero().flatten()
    if len(wrong):
        raise HostReadError(
            f"device {device} read host memory wrongly: {len(wrong)} of {len(rows)} rows differ, the first is row "
            f"{int(rows[wrong[0]])}. Host memory cannot be used for the tables on this machine: update driver and "
            "firmware (HDK), or keep them in device memory (--engram-config '{\"cpu_offload\": false}')"
        )
