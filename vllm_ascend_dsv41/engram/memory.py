"""Host memory for Engram tables: zero, in blocks that a device can be given one by one.

Three kinds: private to a process, shared by processes of a node, and allocated by CANN for kernels up to Linux 5.10,
which cannot register anything else.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..native.threads import spread
from . import numa
from .acl import Acl

logger = logging.getLogger("vllm.dsv41")
HUGE_PAGE = 2 << 20  # of x86_64 and aarch64 with pages of 4 KiB; sizes of blocks are multiples
NAME = "dsv41-engram"
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MAP_NORESERVE = 0x4000  # of linux/mman.h; Python 3.10 does not name it
Bytes = NDArray[np.uint8]


def rounded(size: int) -> int:
    """Up to whole huge pages."""
    return -(-size // HUGE_PAGE) * HUGE_PAGE


class EngramMemoryError(RuntimeError):
    """Host memory could not be had; the text says how much and why."""


class HostMemory(ABC):
    """``size`` bytes in blocks of ``block`` bytes, of which the last may be shorter. Zero until written."""

    pinned = False  # the driver has pinned the pages already, which registration must know
    blocks: list[Bytes]

    def __init__(self, size: int, block: int) -> None:
        if size < 1 or block % HUGE_PAGE:
            raise ValueError(f"{size} bytes in blocks of {block}: blocks are multiples of {HUGE_PAGE} bytes")
        self.block = block

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Whoever still holds an array of it keeps it alive. May be called again."""

    @property
    def addresses(self) -> list[int]:
        """Where each block begins."""
        return [block.ctypes.data for block in self.blocks]

    def touch(self, threads: int) -> None:
        """Let every page be there now, on whichever node was chosen, rather than when it is first used."""
        for block in self.blocks:
            pages = block[:: mmap.PAGESIZE]
            spread(partial(_zero, pages), len(pages), threads)

    def placement(self) -> dict[int, int]:
        """NUMA node -> bytes there."""
        total: dict[int, int] = {}
        for block in self.blocks:
            for node, size in numa.placement(block.ctypes.data, block.nbytes).items():
                total[node] = total.get(node, 0) + size
        return total


class MappedMemory(HostMemory):
    """One mapping of ``length`` bytes."""

    def __init__(self, size: int, block: int, length: int, make: Callable[[int], mmap.mmap]) -> None:
        super().__init__(size, block)
        try:
            self._map: mmap.mmap | None = make(length)
        except (OSError, ValueError, OverflowError) as error:
            raise EngramMemoryError(f"{size:,} bytes of host memory for an Engram table: {error}") from error
        whole = np.frombuffer(self._map, dtype=np.uint8)
        length, start = rounded(size), self._start(whole)
        self.whole = whole[start : start + length]
        """All blocks, one after the other."""
        # the last block reaches to the end of its huge page, so that all of it can be registered
        self.blocks = [whole[start + at : start + min(at + block, length)] for at in range(0, length, block)]

    def _start(self, whole: Bytes) -> int:
        """Where in the mapping the first block begins."""
        return 0

    def bind(self, nodes: list[int]) -> None:
        """Take the pages from these NUMA nodes. To be called before anything is touched."""
        numa.bind(self.whole.ctypes.data, self.whole.nbytes, nodes)

    def use_huge_pages(self) -> None:
        """Ask for transparent huge pages. To be called before anything is touched."""
        if self._map is not None:
            try:
                if "[never]" in HUGE_PAGES.read_text():
                    raise OSError(f"{HUGE_PAGES} says never")
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:
                raise EngramMemoryError(
                    f"no transparent huge pages on this machine ({error}); leave use_thp out"
                ) from error

    def close(self) -> None:
        self.blocks, self.whole = [], self.whole[:0].copy()
        if self._map is not None:
            held, self._map = self._map, None
            try:
                held.close()
            except BufferError:  # a tensor still looks into it: it goes when that one goes
                return


class PrivateMemory(MappedMemory):
    """Anonymous memory of this process."""

    def __init__(self, size: int, block: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        super().__init__(size, block, rounded(size) + HUGE_PAGE, lambda length: mmap.mmap(-1, length, flags=flags))

    def _start(self, whole: Bytes) -> int:
        return int(-whole.ctypes.data % HUGE_PAGE)


class SharedMemory(MappedMemory):
    """Memory that the processes of a node share.

    It has no name and lies in no file system (man 2 memfd_create): the size of /dev/shm does not limit it, and it is
    gone with the last process that uses it, however that ends. ``handle`` tells other processes of the same user how to
    find it; the one who made it must live until they have.
    """

    def __init__(self, size: int, block: int, handle: tuple[int, int] | None = None) -> None:
        try:
            if handle is None:
                self._file = os.fdopen(os.memfd_create(NAME), "r+b", buffering=0)
                os.ftruncate(self._file.fileno(), rounded(size))
            else:
                path = f"/proc/{handle[0]}/fd/{handle[1]}"
                if not os.readlink(path).startswith(f"/memfd:{NAME}"):  # of another process, in another namespace
                    raise OSError(f"{path} is {os.readlink(path)}, not a table")
                self._file = open(path, "r+b", buffering=0)  # noqa: SIM115  it stays open
            found = os.fstat(self._file.fileno()).st_size
            if found != rounded(size):
                raise OSError(f"it has {found:,} bytes")
        except (OSError, OverflowError) as error:
            raise EngramMemoryError(
                f"the shared copy of an Engram table ({size:,} bytes) cannot be made or opened: {error}; ranks that "
                "share run in one container under one user; others have copies of their own (dp_shared_memory false)"
            ) from error
        self.handle = handle or (os.getpid(), self._file.fileno())
        try:
            flags = mmap.MAP_SHARED
            super().__init__(
                size, block, rounded(size), lambda length: mmap.mmap(self._file.fileno(), length, flags=flags)
            )
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        super().close()
        self._file.close()


class PinnedMemory(HostMemory):
    """Memory that CANN allocates and pins, a block at a time. Where its pages lie is the driver's choice."""

    pinned = True

    def __init__(self, size: int, block: int, acl: Acl) -> None:
        super().__init__(size, block)
        self._acl, self.blocks = acl, []
        length = rounded(size)
        try:
            for at in range(0, length, block):
                count = min(block, length - at)
                address = acl.allocate(count)
                self.blocks.append(np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address)))
                ctypes.memset(address, 0, count)
        except BaseException:
            give_back(self)
            raise

    def close(self) -> None:
        """As of the others, except that arrays must not be used afterwards: CANN takes the memory at once."""
        while self.blocks:
            self._acl.free(self.blocks[-1].ctypes.data)
            self.blocks.pop()


def _zero(pages: Bytes, begin: int, end: int) -> None:
    pages[begin:end] = 0


def take(parts: Iterable[str], allocate: Callable[[str], HostMemory]) -> dict[str, HostMemory]:
    """Memory for every part, or for none when one cannot be had."""
    taken: dict[str, HostMemory] = {}
    try:
        for part in parts:
            taken[part] = allocate(part)
    except BaseException:
        for memory in taken.values():
            give_back(memory)
        raise
    return taken


class Closing(Protocol):
    """Anything with ``close``."""

    def close(self) -> None: ...


_not_given_back: list[Closing] = []


def give_back(something: Closing) -> None:
    """Close it after a failure, which then is raised. What cannot be closed stays as it is until the process ends:
    memory that is still registered must not go to somebody else."""
    try:
        something.close()
    except Exception as error:
        _not_given_back.append(something)
        logger.error("Engram: not given back, until this process ends: %s", error)
