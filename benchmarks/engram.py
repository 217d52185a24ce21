"""Engram tables on the CPU: look-up, hashing and loading, against what PyTorch, memcpy and ``cat`` take.

    python benchmarks/engram.py --work DIR [--rows 4 32] [--file-gb 4]

Look-up: tables of ``--rows`` million rows of 256 INT8 codes with eight float32 scales, in memory as serving has it.
Ours gives BF16 values; ``index_select`` gives the codes alone, ``copy`` moves as many bytes as the codes have, one
after the other. Times are the best of ``--repeat`` calls, each with ids of its own, per row. ``skewed``: 9 of 10 ids
among one row in a hundred. Loading: a table of ``--file-gb`` written to DIR, read by ``cat`` and into its place (whose
pages are first touched then), with the page cache holding all of it (warm) or nothing (cold).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from vllm_ascend_dsv41.engram import EngramOptions, EngramTables, Place, Prefetcher
from vllm_ascend_dsv41.engram.memory import PrivateMemory
from vllm_ascend_dsv41.engram.storage import block_rows, part_bytes
from vllm_ascend_dsv41.ops import engram_lookup_mapped, hash_ngrams
from vllm_ascend_dsv41.quant import Checkpoint, Layout, Weights
from vllm_ascend_dsv41.quant.checkpoint import Location, read_header

DIM, GROUPS, GB = 256, 8, 1e9
BATCHES = {"decode, 8 tokens": 8 * 24, "decode, 64 tokens": 64 * 24, "prefill, 1024 tokens": 1024 * 24}


def best(repeat: int, function: Callable[[Any], object], ids: Callable[[], Any]) -> float:
    """Seconds of the quickest call, each with fresh ids."""
    times = []
    for _ in range(repeat):
        given = ids()
        began = time.perf_counter()
        function(given)
        times.append(time.perf_counter() - began)
    return min(times)


def tables(rows: int, huge: bool) -> tuple[Tensor, Tensor, Tensor, int]:
    """codes [rows, 256], addresses [blocks, 2], plain memory to copy from, rows of a block."""
    per_block, sizes = block_rows(DIM, GROUPS, 1 << 30), part_bytes(DIM, GROUPS)
    memory = {part: PrivateMemory(rows * size, per_block * size) for part, size in sizes.items()}
    random = np.random.default_rng(0)
    pattern = random.integers(0, 256, 1 << 24, dtype=np.uint8)
    scales = np.exp2(random.integers(-9, 3, 1 << 20)).astype(np.float32).view(np.uint8)
    for part, content in (("weight", pattern), ("scale", scales)):
        if huge:
            memory[part].use_huge_pages()
        for block in memory[part].blocks:
            for at in range(0, len(block), len(content)):
                block[at : at + len(content)] = content[: len(block) - at]
    whole = memory["weight"]._map
    start = memory["weight"].addresses[0] - np.frombuffer(whole, np.uint8).ctypes.data
    flat = torch.frombuffer(whole, dtype=torch.int8)[start : start + rows * DIM]
    addresses = torch.tensor(list(zip(memory["weight"].addresses, memory["scale"].addresses, strict=True)))
    tables.kept = memory  # type: ignore[attr-defined]
    return flat.view(rows, DIM), addresses, flat, per_block


def ids_of(kind: str, rows: int, count: int) -> Callable[[], Tensor]:
    if kind == "uniform":
        return lambda: torch.randint(0, rows, (count,))
    hot = torch.randperm(rows)[: rows // 100]
    return lambda: torch.where(
        torch.rand(count) < 0.9, hot[torch.randint(0, len(hot), (count,))], torch.randint(0, rows, (count,))
    )


def look_up(rows: int, repeat: int, huge: bool) -> None:
    codes, addresses, flat, per_block = tables(rows, huge)
    pages = "huge pages" if huge else "4 KiB pages"
    for kind in ("uniform", "skewed"):
        for title, count in BATCHES.items():
            ids = ids_of(kind, rows, count)
            cells = []
            for threads in (1, 2):
                torch.set_num_threads(threads)
                shape = rows, per_block, DIM, GROUPS, torch.bfloat16
                ours = best(repeat, lambda i, shape=shape: engram_lookup_mapped(addresses, i[:, None], *shape), ids)
                theirs = best(repeat, lambda i: codes.index_select(0, i), ids)
                parts = iter(flat[: (repeat + 1) * count * DIM].split(count * DIM))
                copied = best(repeat, lambda part: part.clone(), partial(next, parts))
                cells += [f"{seconds / count * 1e9:8.1f}" for seconds in (ours, theirs, copied)]
                cells.append(f"{theirs / ours:6.2f}")
            print(f"{rows >> 20:4} M  {pages:11} {kind:8} {title:21}" + " ".join(cells), flush=True)


def linear(repeat: int) -> None:
    print("\nns a row by rows looked up at once (4 M rows, uniform, 1 thread)")
    _, addresses, _, per_block = tables(4 << 20, huge=False)
    torch.set_num_threads(1)
    for count in (1, 10, 100, 1000, 10_000, 100_000):
        shape = 4 << 20, per_block, DIM, GROUPS, torch.bfloat16
        seconds = best(
            repeat,
            lambda i, shape=shape: engram_lookup_mapped(addresses, i[:, None], *shape),
            ids_of("uniform", 4 << 20, count),
        )
        print(f"  {count:7}: {seconds / count * 1e9:9.1f}", flush=True)


def hashing(repeat: int) -> None:
    print("\nhashing, ms for 8192 tokens (2 layers, 24 columns)")
    constants = [torch.randint(2**40, 2**46, (2, 4)) * 2 + 1, torch.randint(10**7, 2 * 10**7, (2, 3, 8))]
    constants.append(constants[1].flatten(1).cumsum(1))
    for name in ("cpu", "reference"):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            function = hash_ngrams.implementations[name]
            seconds = best(
                repeat, lambda n, f=function: f(n, *constants, 2), lambda: torch.randint(-1, 99_092, (8192, 4))
            )
            print(f"  {name:10} {threads} threads: {seconds * 1e3:.2f}", flush=True)


@contextmanager
def written(work: Path, gb: float) -> Iterator[Checkpoint]:
    """A checkpoint of one table, removed afterwards."""
    rows = int(gb * GB / (DIM + GROUPS * 4)) // 24 * 24
    random, files, locations = np.random.default_rng(1), {}, {}
    for part, dtype, width in (("weight", np.int8, DIM), ("scale", np.float32, GROUPS)):
        key, file = f"layers.1.engram.embed.{part}", f"benchmark_{part}.safetensors"
        values = random.integers(-127, 128, (rows, width), dtype=np.int8).astype(dtype)
        save_file({key: values}, work / file)
        os.sync()
        stored, offset = read_header(work / file)[key]
        files[key], locations[key] = file, Location(file, offset, stored.bytes)
        del values
    try:
        yield Checkpoint(work, Layout.ASCEND, Weights.W8A8, {}, [], files, locations)
    finally:
        for file in files.values():
            (work / file).unlink()


def cache(checkpoint: Checkpoint, warm: bool) -> list[str]:
    paths = [str(checkpoint.directory / file) for file in checkpoint.files.values()]
    if warm:
        subprocess.run(["cat", *paths], stdout=subprocess.DEVNULL, check=True)
    for path in paths if not warm else []:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return paths


def peak() -> int:
    """Most bytes that were resident at once since the last call; begins anew."""
    most = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10
    Path("/proc/self/clear_refs").write_text("5")
    return most


def loading(work: Path, gb: float, repeat: int) -> None:
    print(f"\nloading a table of {gb:g} GB, seconds (ratio to cat)")
    with written(work, gb) as checkpoint:
        size = sum(place.bytes for place in checkpoint.locations.values())
        rows = checkpoint.locations["layers.1.engram.embed.weight"].bytes // DIM
        primes = torch.full((24,), rows // 24)
        for warm in (True, False):
            cat = []
            for _ in range(repeat):
                paths = cache(checkpoint, warm)
                began = time.perf_counter()
                subprocess.run(["cat", *paths], stdout=subprocess.DEVNULL, check=True)
                cat.append(time.perf_counter() - began)
            print(f"  {'warm' if warm else 'cold'}: cat {min(cat):.2f} ({size / min(cat) / GB:.1f} GB/s)")
            for huge in (False, True):
                cells = []
                for threads in (1, 2, 4):
                    options = EngramOptions(load_threads=threads, use_thp=huge)
                    results = [load_once(checkpoint, primes, options, warm, size) for _ in range(repeat)]
                    seconds, extra = min(result[0] for result in results), max(result[1] for result in results)
                    cells.append(f"{threads} threads {seconds:.2f} ({seconds / min(cat):.2f}), extra {extra >> 20} MiB")
                print(f"    {'huge' if huge else '4 KiB'} pages: {'; '.join(cells)}", flush=True)


def load_once(
    checkpoint: Checkpoint, primes: Tensor, options: EngramOptions, warm: bool, size: int
) -> tuple[float, int]:
    """Seconds, and resident bytes beyond the table's own."""
    made = EngramTables(checkpoint, [(1, primes)], DIM, options, Place(torch.device("cpu")))
    cache(checkpoint, warm)
    peak()
    before = peak()
    began = time.perf_counter()
    made.load()
    seconds, extra = time.perf_counter() - began, peak() - before - size
    made.close()
    return seconds, extra


def prefetching(repeat: int) -> None:
    """A look-up beside a layer's products, as far as two cores have any to spare."""
    print("\nlook-up of 256 tokens beside products that take about as long, ms (2 threads)")
    torch.set_num_threads(2)
    _, addresses, _, per_block = tables(4 << 20, huge=False)
    weight = torch.randn(1024, 1024)
    shape = 4 << 20, per_block, DIM, GROUPS, torch.bfloat16
    for on in (False, True):
        prefetcher = Prefetcher(torch.device("cpu"), on)

        def step(ids: Tensor, prefetcher: Prefetcher = prefetcher) -> None:
            pending = prefetcher.start(lambda rows: engram_lookup_mapped(addresses, rows, *shape), ids[:, None])
            x = torch.ones(64, 1024)
            for _ in range(4):
                x = x @ weight
            pending.wait()

        seconds = best(5 * repeat, step, ids_of("uniform", 4 << 20, 256 * 24))
        print(f"  prefetch {'on ' if on else 'off'}: {seconds * 1e3:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="*", default=[4, 32], help="million rows of the tables")
    parser.add_argument("--file-gb", type=float, default=4.0)
    parser.add_argument("--repeat", type=int, default=9)
    arguments = parser.parse_args()
    columns = " ".join(f"{name:>8}" for name in ("ours", "select", "copy")) + "  ratio"
    print(f"look-up, ns a row{'':32}1 thread: {columns}  2 threads: {columns}")
    for rows in arguments.rows:
        for huge in (False, True):
            look_up(rows << 20, arguments.repeat, huge)
    linear(arguments.repeat)
    hashing(arguments.repeat)
    prefetching(arguments.repeat)
    loading(arguments.work, arguments.file_gb, max(2, arguments.repeat // 2))


if __name__ == "__main__":
    main()
