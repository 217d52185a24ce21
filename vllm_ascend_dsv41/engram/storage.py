"""Where an Engram table lives, behind one interface.

    DeviceTable       memory of the device
    RegisteredTable   host memory that the device reads itself
    HostTable         host memory for a device that is the CPU

Host memory is private to the rank, or one copy that ranks of a node share (memory.py).

A table has two parts, named as the checkpoint names them: ``weight`` [rows, dim], INT8 codes or BF16, and ``scale``
[rows, groups] float32, which BF16 tables lack.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..ops import engram_lookup, engram_lookup_mapped
from .acl import Acl
from .memory import HUGE_PAGE, Bytes, HostMemory, MappedMemory
from .registration import Registration
from .sharding import TableShard

STAGING = 16 << 20  # bytes on their way to device memory
OFFSET_LIMIT = 1 << 31  # what a kernel adds to a block's address is 32 bits wide


def part_bytes(dim: int, groups: int) -> dict[str, int]:
    """Part -> bytes of a row. ``groups``: scales of a row, 0 for BF16."""
    return {"weight": dim, "scale": groups * 4} if groups else {"weight": dim * 2}


def block_rows(dim: int, groups: int, chunk: int) -> int:
    """Rows of a block: at most ``chunk`` bytes of codes, in whole huge pages of each part (at least one such)."""
    sizes = part_bytes(dim, groups).values()
    unit = math.lcm(*(HUGE_PAGE // math.gcd(HUGE_PAGE, size) for size in sizes))
    rows = max(1, min(chunk, OFFSET_LIMIT - 1) // (unit * max(sizes))) * unit
    if rows * max(sizes) >= OFFSET_LIMIT:
        raise ValueError(
            f"Engram rows of {dim} values with {groups} scales: {unit} rows fill no huge pages below 2 GiB"
        )
    return rows


class Table(ABC):
    """One rank's rows of one table. Zero until loaded."""

    kind: ClassVar[str]
    concurrent: ClassVar[bool] = True
    """Whether ``spans`` may be filled in any order and by several threads."""

    def __init__(self, shard: TableShard, groups: int) -> None:
        self.shard, self.groups = shard, groups

    @property
    def part_sizes(self) -> dict[str, int]:
        """Part -> its bytes on this rank."""
        return {part: size * self.shard.rows for part, size in part_bytes(self.shard.dim, self.groups).items()}

    @abstractmethod
    def spans(self, part: str) -> Iterator[tuple[int, Bytes]]:
        """(offset in the part, memory to be filled from there): all of a part, once."""

    @abstractmethod
    def lookup(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the whole table [T, columns] int64 -> [T, columns, dim] in ``dtype``; zeros for those not here."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back, which nothing may use any more. May be called again, also after it failed."""

    def placement(self) -> dict[int, int]:
        """NUMA node -> bytes there, of host memory."""
        return {}


class DeviceTable(Table):
    """Rows in memory of the device, which may be the CPU."""

    kind = "device memory"
    concurrent = False

    def __init__(self, shard: TableShard, groups: int, device: torch.device) -> None:
        super().__init__(shard, groups)
        dtype = torch.int8 if groups else torch.bfloat16
        self.codes: Tensor | None = torch.zeros(shard.rows, shard.dim, dtype=dtype, device=device)
        self.scale = torch.zeros(shard.rows, groups, dtype=torch.float32, device=device) if groups else None

    def spans(self, part: str) -> Iterator[tuple[int, Bytes]]:
        place = self.codes if part == "weight" else self.scale
        assert place is not None
        flat = place.view(torch.uint8).flatten()
        staging = torch.empty(min(STAGING, len(flat)), dtype=torch.uint8, device="cpu")
        for begin in range(0, len(flat), STAGING):
            now = staging[: len(flat) - begin]
            yield begin, now.numpy()
            flat[begin : begin + len(now)] = now

    def lookup(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        if self.codes is None:
            raise RuntimeError("the Engram table in device memory is closed")
        return engram_lookup(self.codes, self.scale, rows - self.shard.first_row, dtype)

    def close(self) -> None:
        self.codes = self.scale = None


class _HostMemoryTable(Table):
    """Rows in blocks of host memory, by part."""

    def __init__(self, shard: TableShard, groups: int, memory: Mapping[str, HostMemory]) -> None:
        super().__init__(shard, groups)
        self.memory = dict(memory)

    def spans(self, part: str) -> Iterator[tuple[int, Bytes]]:
        at, left = 0, self.part_sizes[part]
        for block in self.memory[part].blocks:
            used = block[:left]
            yield at, used
            at, left = at + len(used), left - len(used)

    def placement(self) -> dict[int, int]:
        total: dict[int, int] = {}
        for memory in self.memory.values():
            for node, size in memory.placement().items():
                total[node] = total.get(node, 0) + size
        return dict(sorted(total.items()))

    def close(self) -> None:
        for memory in self.memory.values():
            memory.close()


class HostTable(_HostMemoryTable):
    """Rows that the CPU looks up itself, in one piece."""

    kind = "host memory"

    def __init__(self, shard: TableShard, groups: int, memory: Mapping[str, MappedMemory]) -> None:
        super().__init__(shard, groups, memory)
        flat = {part: torch.from_numpy(memory[part].whole[:size]) for part, size in self.part_sizes.items()}
        dtype = torch.int8 if groups else torch.bfloat16
        self._codes: Tensor | None = flat["weight"].view(dtype).view(shard.rows, shard.dim)
        self._scale = flat["scale"].view(torch.float32).view(shard.rows, groups) if groups else None

    def lookup(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        if self._codes is None:
            raise RuntimeError("the Engram table in host memory is closed")
        return engram_lookup(self._codes, self._scale, rows - self.shard.first_row, dtype)

    def close(self) -> None:
        self._codes = self._scale = None
        super().close()


class RegisteredTable(_HostMemoryTable):
    """Rows that the device reads from host memory, once ``open`` has registered it."""

    kind = "registered host memory"

    def __init__(
        self, shard: TableShard, groups: int, memory: Mapping[str, HostMemory], acl: Acl, device: torch.device
    ) -> None:
        super().__init__(shard, groups, memory)
        self._block_rows = memory["weight"].block // part_bytes(shard.dim, groups)["weight"]
        self._device, self._addresses = device, torch.empty(0, 2, dtype=torch.int64, device=device)
        self._registrations = [Registration(acl, part, device.index or 0) for part in self.memory.values()]

    def open(self) -> None:
        """Register all parts for the device. Whoever opens it closes it, also after AclError or DeviceNotSetError."""
        for registration in self._registrations:
            registration.open()
        parts = [registration.addresses for registration in self._registrations]
        parts += [[0] * len(parts[0])] * (2 - len(parts))  # a BF16 table has no scales
        self._addresses = torch.tensor(list(zip(*parts, strict=True)), device="cpu").to(self._device)

    def lookup(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        if not len(self._addresses):
            raise RuntimeError("the Engram table in registered host memory is not open")
        shape = self.shard.rows, self._block_rows, self.shard.dim, self.groups
        return engram_lookup_mapped(self._addresses, rows - self.shard.first_row, *shape, dtype)

    def close(self) -> None:
        self._addresses = self._addresses[:0]
        for registration in reversed(self._registrations):
            registration.close()
        super().close()  # only now: registered memory must not go
