"""Tables on a machine without accelerator: rows, shards, loading, memory, refusals."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_ascend_dsv41.engram import (
    EngramOptionError,
    EngramOptions,
    EngramShardError,
    EngramTables,
    Place,
    TableShard,
    limits,
    loader,
    numa,
)
from vllm_ascend_dsv41.engram.loader import load_table
from vllm_ascend_dsv41.engram.memory import EngramMemoryError, MappedMemory, PrivateMemory, SharedMemory, rounded
from vllm_ascend_dsv41.engram.storage import DeviceTable, HostTable, block_rows, part_bytes
from vllm_ascend_dsv41.quant import CheckpointError, Weights
from vllm_ascend_dsv41.quant.checkpoint import Location

from .tables import DIM, expected, primes, write_tables

ROWS = {1: 300_007, 4: 5000}
CPU = torch.device("cpu")
MEMORY = {"private": PrivateMemory, "shared": SharedMemory}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("tables"), ROWS)


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("bf16"), ROWS, Weights.BF16)


def tables(checkpoint, shard=0, shards=1, **options):
    layers = [(layer, primes(rows)) for layer, rows in ROWS.items()]
    made = EngramTables(checkpoint, layers, DIM, EngramOptions(**options), Place(CPU, shard, shards))
    assert made.load() == set(checkpoint.files)
    return made


@pytest.mark.parametrize("kind", ["checkpoint", "bf16"])
@pytest.mark.parametrize("cpu_offload", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_file(request, kind, cpu_offload, dtype):
    files = request.getfixturevalue(kind)
    made = tables(files, cpu_offload=cpu_offload, chunk_mib=16)
    for number, (layer, rows) in enumerate(ROWS.items()):
        ids = torch.cat([torch.randint(-5, rows + 5, (300, 4)), torch.tensor([[0, rows - 1, 262_143, 262_144]])])
        assert torch.equal(made[number].lookup(ids, dtype), expected(files, layer, ids, dtype))
    made.close()


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 6, 8, 12, 24])
def test_every_division_gives_the_same_rows(checkpoint, shards):
    """Look-ups of all shards, put side by side as the gather does it."""
    rows = primes(ROWS[1])
    offsets = rows.cumsum(0) - rows
    ids = offsets + torch.randint(0, 1 << 40, (50, 24)) % rows
    ids[7] = -1
    parts = []
    for shard in range(shards):
        made = tables(checkpoint, shard, shards, load_threads=2)
        own = made[0].shard
        columns = slice(own.first_column, own.first_column + own.columns)
        parts.append(made[0].lookup(ids[:, columns], torch.float32))
        elsewhere = torch.cat([ids[:, : columns.start], ids[:, columns.stop :]], dim=1)
        if shards > 1:
            assert not made[0].lookup(elsewhere, torch.float32).any()
            assert f"hash columns {own.first_column} to" in made.report()[0]
        made.close()
    assert torch.equal(torch.cat(parts, dim=1), expected(checkpoint, 1, ids, torch.float32))


@pytest.mark.parametrize("shards", [5, 16, 48])
def test_columns_that_cannot_be_divided(checkpoint, shards):
    with pytest.raises(EngramShardError, match=rf"24 .* among {shards} ranks.*tensor-parallel.*dp_shared_memory"):
        tables(checkpoint, 0, shards)


def test_released_tables_over_the_ranks_of_the_recipes():
    """TP8: three columns a rank, some 12 GiB a table."""
    sizes = torch.full((24,), 16_000_257)
    shards = [TableShard.of(sizes, 256, rank, 8) for rank in range(8)]
    assert [shard.first_row for shard in shards] == [rank * 3 * 16_000_257 for rank in range(8)]
    assert {shard.columns for shard in shards} == {3}
    assert sum(part_bytes(256, 8).values()) * shards[0].rows == pytest.approx(12.9 * 2**30, rel=0.01)
    assert block_rows(256, 8, 1 << 30) == 1 << 22  # codes of a GiB, scales of 128 MiB


@pytest.mark.parametrize(("dim", "groups"), [(256, 8), (64, 2), (96, 3), (32, 1), (128, 0), (8192, 256)])
@pytest.mark.parametrize("chunk", [2 << 20, 1 << 30, 3 << 30])
def test_blocks_are_whole_huge_pages_with_offsets_of_32_bits(dim, groups, chunk):
    rows = block_rows(dim, groups, chunk)
    for size in part_bytes(dim, groups).values():
        assert rows * size % (2 << 20) == 0
        assert rows * size < 1 << 31


# ---- loading ---------------------------------------------------------------------------------------------------------


def test_zero_until_loaded(checkpoint):
    layers = [(layer, primes(rows)) for layer, rows in ROWS.items()]
    made = EngramTables(checkpoint, layers, DIM, EngramOptions(), Place(CPU))
    assert not made[0].lookup(torch.arange(100)[:, None], torch.float32).any()
    made.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_progress_counts_every_byte(checkpoint, threads):
    memory = {part: PrivateMemory(ROWS[1] * size, rounded(ROWS[1] * size)) for part, size in part_bytes(DIM, 2).items()}
    table, said = HostTable(TableShard(0, 24, 0, ROWS[1], DIM), 2, memory), []
    load_table(checkpoint, "layers.1.engram.embed", table, threads, lambda *numbers: said.append(numbers))
    total = ROWS[1] * (DIM + 8)
    assert said[-1] == (total, total)
    assert [done for done, _ in said] == sorted(done for done, _ in said)


@pytest.mark.parametrize("make", ["host", "device"])
def test_a_file_that_was_cut_meanwhile(tmp_path, make, monkeypatch):
    files = write_tables(tmp_path, ROWS)
    path = tmp_path / files.files["layers.1.engram.embed.weight"]
    if make == "host":
        table = HostTable(
            TableShard(0, 24, 0, ROWS[1], DIM),
            2,
            {part: PrivateMemory(ROWS[1] * size, rounded(ROWS[1] * size)) for part, size in part_bytes(DIM, 2).items()},
        )
    else:
        table = DeviceTable(TableShard(0, 24, 0, ROWS[1], DIM), 2, CPU)
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(CheckpointError, match=rf"{path}: .* bytes, its header promises"):
        load_table(files, "layers.1.engram.embed", table, 2)
    monkeypatch.setattr(loader, "_check_header", lambda *_: None)  # it is cut after that
    with pytest.raises(CheckpointError, match=rf"{path}: ends before byte .* fetch it again"):
        load_table(files, "layers.1.engram.embed", table, 2)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path}: cannot be opened"):
        load_table(files, "layers.1.engram.embed", table, 2)


def test_a_file_that_was_exchanged_meanwhile(tmp_path):
    """Its header is longer, and all rows have moved."""
    files = write_tables(tmp_path, ROWS)
    key = "layers.1.engram.embed.weight"
    path = tmp_path / files.files[key]
    with safe_open(path, "pt") as old:
        save_file({key: old.get_tensor(key)}, path, metadata={"note": "x" * 100})
    with pytest.raises(CheckpointError, match=rf"{path}: {key} has moved since the checkpoint was checked"):
        tables(files)


@pytest.mark.parametrize("cpu_offload", [True, False])
def test_loading_takes_little_memory_beside_the_table(tmp_path, cpu_offload):
    rows, status = 1_500_000, Path("/proc/self/status")
    files = write_tables(tmp_path, {1: rows})
    options = EngramOptions(cpu_offload=cpu_offload)
    made = EngramTables(files, [(1, primes(rows))], DIM, options, Place(CPU))
    if cpu_offload:
        for memory in made[0].memory.values():
            memory.touch(1)
    else:
        made[0].codes.fill_(1), made[0].scale.fill_(1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = int(status.read_text().split("VmHWM:")[1].split()[0]) << 10
    made.load()
    grown = (int(status.read_text().split("VmHWM:")[1].split()[0]) << 10) - before
    assert grown < 64 << 20
    made.close()


def test_data_of_another_size_are_refused_before_memory_is_taken(checkpoint, monkeypatch):
    monkeypatch.setattr("vllm_ascend_dsv41.engram.tables.private_memory", None)
    key = "layers.4.engram.embed.scale"
    place = checkpoint.locations[key]
    other = replace(
        checkpoint, locations={**checkpoint.locations, key: Location(place.file, place.offset, place.bytes - 8)}
    )
    with pytest.raises(CheckpointError, match=r"scale has 39,992 bytes.*5,000 rows of 8.*config.json that belongs"):
        tables(other)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MEMORY)
def test_blocks_of_memory(kind):
    memory = MEMORY[kind](5_000_000, 2 << 20)
    assert [len(block) for block in memory.blocks] == [2 << 20] * 3
    assert all(address % mmap.PAGESIZE == 0 for address in memory.addresses)
    assert kind == "shared" or all(address % (2 << 20) == 0 for address in memory.addresses)
    assert not any(block.any() for block in memory.blocks)
    memory.touch(threads=2)
    assert sum(memory.placement().values()) == 6 << 20
    memory.close()
    memory.close()
    assert memory.blocks == []


def test_memory_in_use_outlives_closing():
    memory = PrivateMemory(100, 2 << 20)
    tensor = torch.from_numpy(memory.blocks[0])
    memory.close()
    tensor.fill_(7)
    assert int(tensor.sum()) == 7 << 21


def test_pages_are_where_they_were_asked_for():
    nodes = numa.nodes()
    for where in (nodes, []):  # or the toucher's own
        memory = PrivateMemory(4 << 20, 2 << 20)
        memory.bind(where)
        memory.touch(threads=1)
        assert sum(memory.placement().values()) == 4 << 20
        assert set(memory.placement()) <= set(nodes)
    with pytest.raises(OSError, match="mbind to nodes"):
        memory.bind([1000])


def test_nodes_that_are_not_there(checkpoint):
    with pytest.raises(EngramOptionError, match=r"numa is '0,5000'; this machine's nodes with memory are"):
        tables(checkpoint, numa="0,5000")


def test_a_container_that_forbids_to_choose_nodes(checkpoint, monkeypatch, caplog):
    def forbidden(self, nodes):
        raise PermissionError(1, "mbind to nodes [0, 1]: Operation not permitted")

    monkeypatch.setattr(MappedMemory, "bind", forbidden)
    node = str(numa.nodes()[0])
    with pytest.raises(EngramMemoryError, match=r"SYS_NICE.*or numa off"):
        tables(checkpoint, numa=node)
    tables(checkpoint, numa="off").close()
    monkeypatch.setattr(EngramTables, "_nodes", lambda self: [0, 1])
    with caplog.at_level("WARNING", "vllm.dsv41"):
        tables(checkpoint).close()  # on its own account it goes on
    assert "Pages lie where they are touched" in caplog.text


def test_huge_pages_where_there_are_none(monkeypatch, tmp_path):
    monkeypatch.setattr("vllm_ascend_dsv41.engram.memory.HUGE_PAGES", tmp_path / "enabled")
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    with pytest.raises(EngramMemoryError, match=r"says never.*leave use_thp out"):
        PrivateMemory(4096, 2 << 20).use_huge_pages()


def test_huge_pages_are_asked_for():
    memory = PrivateMemory(64 << 20, 2 << 20)
    memory.use_huge_pages()
    address = memory.addresses[0]
    memory.touch(threads=1)
    flags = {}
    for line in open("/proc/self/smaps"):  # noqa: SIM115
        if "-" in line.split()[0] and line.split()[0][0] in "0123456789abcdef":
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if line.startswith("VmFlags") and first <= address < last:
            flags = set(line.split()[1:])
    assert "hg" in flags


def test_a_second_process_sees_shared_memory():
    memory = SharedMemory(3 << 20, 2 << 20)
    other = SharedMemory(3 << 20, 2 << 20, handle=memory.handle)
    memory.blocks[1][5] = 9
    assert other.blocks[1][5] == 9
    assert other.addresses != memory.addresses
    memory.close()
    assert other.blocks[1][5] == 9
    other.close()


def test_a_file_that_is_no_shared_copy(tmp_path):
    """Process and descriptor numbers mean something else in another container."""
    with open(tmp_path / "other", "w+b") as other, pytest.raises(EngramMemoryError, match="not a table"):
        SharedMemory(4096, 2 << 20, handle=(os.getpid(), other.fileno()))
    memory = SharedMemory(3 << 20, 2 << 20)
    with pytest.raises(EngramMemoryError, match=r"it has 4,194,304 bytes"):
        SharedMemory(5 << 20, 2 << 20, handle=memory.handle)
    memory.close()


def test_a_shared_copy_goes_with_its_last_user():
    before = len(os.listdir("/proc/self/fd"))
    SharedMemory(4096, 2 << 20)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_cannot_be_had():
    with pytest.raises(EngramMemoryError, match=r"bytes of host memory for an Engram table"):
        PrivateMemory(1 << 60, 2 << 20)
    with pytest.raises(EngramMemoryError, match=r"one container under one user"):
        SharedMemory(4096, 2 << 20, handle=(os.getpid(), 9999))
    with pytest.raises(ValueError, match="multiples of 2097152"):
        PrivateMemory(4096, 4096)


def test_closed_tables_are_not_looked_up(checkpoint):
    made = tables(checkpoint)
    table = made[0]
    made.close()
    made.close()
    with pytest.raises(RuntimeError, match="is closed"):
        table.lookup(torch.zeros(1, 1, dtype=torch.int64), torch.float32)
    assert made.report() == []


@pytest.mark.parametrize("limit", ["machine", "control_group"])
def test_too_little_memory_is_noticed_before_any_is_taken(checkpoint, monkeypatch, limit):
    monkeypatch.setattr(limits, limit, lambda: limits.Available(10 << 20, "memory.max = 1"))
    monkeypatch.setattr("vllm_ascend_dsv41.engram.tables.private_memory", None)
    with pytest.raises(
        EngramMemoryError,
        match=r"1 ranks of this machine need 0.0 GiB.*there are 0.0 GiB \(memory.max = 1\).*dp_shared",
    ):
        tables(checkpoint)


def test_reports_say_where_each_table_lives(checkpoint):
    made = tables(checkpoint, chunk_mib=16)
    first, second = made.report()
    assert first.startswith("layers.1.engram.embed: 300,007 rows, INT8, 20.60 MiB in host memory, loaded in ")
    assert "; pages: node " in first
    assert second.startswith("layers.4.engram.embed: 5,000 rows")
    made.close()
    made = tables(checkpoint, cpu_offload=False)
    assert "in device memory" in made.report()[0]
    made.close()


def test_a_forked_child_looks_up_with_threads_of_its_own(checkpoint):
    """The parent's threads are not there, its pool is."""
    program = f"""
import os, sys, torch
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from vllm_ascend_dsv41.native.threads import spread
done = []
spread(lambda begin, end: done.append((begin, end)), 10, 3)
child = os.fork()
if child == 0:
    spread(lambda begin, end: done.append((begin, end)), 10, 3)
    os._exit(len(done))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "6\n", done.stderr


def test_look_ups_of_many_threads(checkpoint):
    """Enough rows for several threads; the parts meet without a seam."""
    torch.set_num_threads(3)
    made = tables(checkpoint)
    ids = torch.from_numpy(np.random.default_rng(0).integers(-9, ROWS[1] + 9, (5000, 24)))
    assert torch.equal(made[0].lookup(ids, torch.bfloat16), expected(checkpoint, 1, ids, torch.bfloat16))
    made.close()
    torch.set_num_threads(os.cpu_count() or 1)
