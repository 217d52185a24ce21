"""All Engram tables of a rank, from the first check to the last release."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..quant import Checkpoint
from . import limits, numa
from .acl import Acl
from .loader import load_table, table_groups
from .memory import (
    EngramMemoryError,
    HostMemory,
    MappedMemory,
    SharedMemory,
    give_back,
    take,
)
from .options import EngramOptionError, EngramOptions
from .peers import Peers
from .probe import private_memory, probe
from .sharding import TableShard
from .storage import DeviceTable, HostTable, RegisteredTable, Table, block_rows, part_bytes

logger = logging.getLogger("vllm.dsv41")
PROGRESS_SECONDS = 10.0
GIB = 2.0**30


@dataclass(frozen=True)
class Place:
    """Where a rank stands."""

    device: torch.device
    shard: int = 0
    shards: int = 1
    """Which part of the hash columns is its own, of how many."""
    everyone: Peers = field(default_factory=Peers)
    """All ranks that start together."""
    sharing: Peers | None = None
    """The ranks of this node with the same part, which use one copy; None: each has its own."""
    runtime: Callable[[], Acl] | None = None
    """Opens what registers host memory for the device; None where the device is the CPU."""


@dataclass
class _Layer:
    prefix: str
    shard: TableShard
    columns: int
    groups: int
    table: Table | None = None
    seconds: float = 0.0


class EngramTables:
    """The tables of ``layers`` (layer of the model, bucket counts of its hash functions), each in its place.

    Making it checks everything that can be checked, on all ranks, before any memory is taken; then takes the memory and
    registers it. What fails on one rank raises on all of them: its own exception there, PeerError elsewhere. ``load``
    fills the tables.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layers: Iterable[tuple[int, Tensor]],
        dim: int,
        options: EngramOptions,
        place: Place,
    ) -> None:
        self._checkpoint, self._options, self._place, self._dim = checkpoint, options, place, dim
        everyone = place.everyone
        self._layers = everyone.together("checking the Engram tables", lambda: self._plan(layers))
        self._check_memory()
        self._acl = everyone.together("looking at the runtime", self._runtime)
        if self._acl is not None:
            _registered.append(self)
        try:
            for layer in self._layers:
                self._make(layer)
        except BaseException:
            give_back(self)
            raise

    def __getitem__(self, number: int) -> Table:
        """The table of the ``number``-th of the layers."""
        table = self._layers[number].table
        assert table is not None, "the tables were closed"
        return table

    # ---- before memory is taken --------------------------------------------------------------------------------------

    def _plan(self, layers: Iterable[tuple[int, Tensor]]) -> list[_Layer]:
        plan = []
        for index, primes in layers:
            prefix = f"layers.{index}.engram.embed"
            shard = TableShard.of(primes, self._dim, self._place.shard, self._place.shards)
            plan.append(
                _Layer(prefix, shard, primes.numel(), table_groups(self._checkpoint, prefix, primes, self._dim))
            )
        return plan

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's tables, whether shared or not."""
        return sum(layer.shard.rows * size for layer in self._layers for size in self._sizes(layer).values())

    def _sizes(self, layer: _Layer) -> dict[str, int]:
        return part_bytes(layer.shard.dim, layer.groups)

    @property
    def _writes(self) -> bool:
        """Whether this rank makes and fills the memory that it uses."""
        return self._place.sharing is None or self._place.sharing.rank == 0

    def _check_memory(self) -> None:
        """Compare what all ranks of this machine are about to take with what there is, before the first takes any."""
        everyone, what = self._place.everyone, "comparing the Engram tables with the memory"
        in_host_memory = self._options.cpu_offload or self._place.device.type == "cpu"
        own = self.nbytes if in_host_memory and self._writes else 0
        here = _machine(), limits.container()
        needs = everyone.exchange((*here, own), what)
        machine = [size for name, _, size in needs if name == here[0]]
        container = [size for *names, size in needs if tuple(names) == here]

        def compare() -> None:
            limits.check_memory(sum(machine), len(machine), limits.machine())
            group = limits.control_group()
            if group is not None:
                limits.check_memory(sum(container), len(container), group)

        everyone.together(what, compare)

    def _runtime(self) -> Acl | None:
        """The runtime that registers host memory, after it has done so once; None where none is needed."""
        if self._place.runtime is None or not self._options.cpu_offload:
            return None
        mapped = limits.maps_anonymous_memory()
        for name in ("dp_shared_memory", "use_thp"):
            if getattr(self._options, name) and not mapped:
                raise EngramOptionError(
                    f"{name} needs a Linux kernel after 5.10, this one is {os.uname().release}: before, CANN registers "
                    "only memory that it has allocated, which cannot be shared or laid out; leave the option out"
                )
        runtime = self._place.runtime()
        logger.info("Engram: CANN %s, Linux %s", runtime.version(), os.uname().release)
        for warning in limits.registration_warnings(self.nbytes):
            logger.warning("Engram: %s", warning)
        probe(runtime, self._place.device, lambda size, block: private_memory(size, block, runtime))
        logger.info("Engram: %s has read 2 MiB of host memory as they are", self._place.device)
        return runtime

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _memory(self, what: str, size: int, block: int) -> HostMemory:
        sharing, everyone = self._place.sharing, self._place.everyone
        if sharing is None:
            return everyone.together(what, lambda: private_memory(size, block, self._acl))
        own = everyone.together(what, lambda: SharedMemory(size, block) if self._writes else None)
        try:
            handle = sharing.exchange(None if own is None else own.handle, what)[0]
            return everyone.together(what, lambda: own or SharedMemory(size, block, handle))
        except BaseException:
            if own is not None:
                give_back(own)
            raise

    def _make(self, layer: _Layer) -> None:
        """The table of a layer, its memory taken, placed and registered."""
        place, options, everyone = self._place, self._options, self._place.everyone
        what = f"making the table {layer.prefix}"
        if not options.cpu_offload:
            layer.table = everyone.together(what, lambda: DeviceTable(layer.shard, layer.groups, place.device))
            return
        rows = block_rows(layer.shard.dim, layer.groups, options.chunk_mib << 20)
        sizes = self._sizes(layer)
        memory = take(sizes, lambda part: self._memory(what, layer.shard.rows * sizes[part], rows * sizes[part]))
        if self._acl is not None:
            layer.table = RegisteredTable(layer.shard, layer.groups, memory, self._acl, place.device)
        else:
            mapped = {part: held for part, held in memory.items() if isinstance(held, MappedMemory)}
            layer.table = HostTable(layer.shard, layer.groups, mapped)
        everyone.together(f"{what}: placing its pages", lambda: self._place_pages(memory))
        if isinstance(layer.table, RegisteredTable):
            everyone.together(f"{what}: registering it", layer.table.open)

    def _place_pages(self, memory: dict[str, HostMemory]) -> None:
        """Choose the NUMA nodes, then let all pages be there: registering would do so one by one."""
        if not self._writes:
            return
        nodes = self._nodes()
        for part in memory.values():
            if isinstance(part, MappedMemory):
                if nodes is not None:
                    self._bind(part, nodes)
                if self._options.use_thp:
                    part.use_huge_pages()
                if self._acl is not None:
                    part.touch(self._options.load_threads)

    def _bind(self, part: MappedMemory, nodes: list[int]) -> None:
        try:
            part.bind(nodes)
        except OSError as error:
            text = f"{error}; containers need SYS_NICE for it (docker run --cap-add SYS_NICE), or numa off"
            if self._options.numa != "auto":
                raise EngramMemoryError(text) from error
            logger.warning("Engram: %s. Pages lie where they are touched; rows from another node take longer", text)

    def _nodes(self) -> list[int] | None:
        options, device = self._options, self._place.device
        if options.numa == "off":
            return None
        every = numa.nodes()
        if options.nodes is not None:
            if not set(options.nodes) <= set(every):
                raise EngramOptionError(f"numa is {options.numa!r}; this machine's nodes with memory are {every}")
            return options.nodes
        if options.numa == "interleave" or self._place.sharing is not None:
            return every if len(every) > 1 else None
        if self._acl is None:  # near the ranks' threads, which are bound; vLLM binds memory, too, and strictly
            return [] if len(every) > 1 else None
        node = numa.node_of_npu(device.index or 0)
        if node is None and len(every) > 1:
            logger.warning("Engram: the NUMA node of %s cannot be told; its tables lie on all nodes in turn", device)
            return every
        return None if node is None else [node]

    # ---- use ---------------------------------------------------------------------------------------------------------

    def load(self) -> set[str]:
        """Fill every table from the checkpoint; returns the keys that were read. What fails closes the tables."""
        try:
            for layer in self._layers:
                self._place.everyone.together(f"loading the table {layer.prefix}", partial(self._load, layer))
        except BaseException:
            give_back(self)
            raise
        for line in self.report():
            logger.info("Engram: %s", line)
        return {f"{layer.prefix}.{part}" for layer in self._layers for part in self._sizes(layer)}

    def _load(self, layer: _Layer) -> None:
        assert layer.table is not None
        if self._writes:
            began = time.monotonic()
            load_table(self._checkpoint, layer.prefix, layer.table, self._options.load_threads, _Progress(layer.prefix))
            layer.seconds = time.monotonic() - began

    def report(self) -> list[str]:
        """A line per table: where it lives, bytes, seconds, pages."""
        return [self._line(layer) for layer in self._layers if layer.table is not None]

    def _line(self, layer: _Layer) -> str:
        table, shard, sharing = layer.table, layer.shard, self._place.sharing
        assert table is not None
        size = sum(table.part_sizes.values())
        text = (
            f"{layer.prefix}: {shard.rows:,} rows, {'INT8' if layer.groups else 'BF16'}, {_bytes(size)} in {table.kind}"
        )
        if shard.columns < layer.columns:
            last = shard.first_column + shard.columns - 1
            text += f", hash columns {shard.first_column} to {last} of {layer.columns}"
        if sharing is not None and sharing.size > 1:
            text += f", one copy for {sharing.size} ranks"
        if layer.seconds:
            text += f", loaded in {layer.seconds:.1f} s ({size / layer.seconds / 1e9:.1f} GB/s)"
        pages = ", ".join(f"node {node} {_bytes(there)}" for node, there in table.placement().items())
        return f"{text}; pages: {pages}" if pages else text

    def close(self) -> None:
        """Give everything back, last table first. May be called again. A failure is raised after the other tables are
        closed, and its table can be tried again."""
        failed: Exception | None = None
        for layer in reversed(self._layers):
            try:
                if layer.table is not None:
                    layer.table.close()
                layer.table = None
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed
        if self in _registered:
            _registered.remove(self)


_registered: list[EngramTables] = []
"""Tables that a device may read: their memory must not go while it is registered, whoever has forgotten them."""


@atexit.register
def _close_registered() -> None:
    for tables in _registered[::-1]:
        give_back(tables)


def _bytes(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"


class _Progress:
    """A line every ten seconds."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._began = prefix, time.monotonic()
        self._said = self._began

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._said < PROGRESS_SECONDS or done == total:
            return
        self._said, rate = now, done / max(now - self._began, 1e-9) / 1e9
        logger.info("Engram: %s: %.1f of %.1f GiB read, %.1f GB/s", self._prefix, done / GIB, total / GIB, rate)


def _machine() -> str:
    """The same for all processes of a machine, in whichever containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
