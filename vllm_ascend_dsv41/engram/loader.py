"""Reading a table from safetensors straight into its place."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from ..quant import Checkpoint, CheckpointError, Weights
from .memory import Bytes
from .storage import Table, part_bytes

SLICE = 8 << 20  # bytes that a thread reads at once
GROUP = 32  # values that share a scale
Progress = Callable[[int, int], None]


def table_groups(checkpoint: Checkpoint, prefix: str, primes: Tensor, dim: int) -> int:
    """Scales of a row of the table ``<prefix>.weight``, 0 for a BF16 table. primes: bucket counts of its hash functions.

    Raises CheckpointError where the data of the file are not the rows that the hash functions address, before memory is
    taken: other rows give plausible text. (``open_checkpoint`` has compared dtypes and shapes with the config.)
    """
    groups = 0 if checkpoint.weights is Weights.BF16 else dim // GROUP
    for part, size in part_bytes(dim, groups).items():
        key, rows = f"{prefix}.{part}", int(primes.sum())
        found = checkpoint.locations[key].bytes
        if found != rows * size:
            raise CheckpointError(
                f"{checkpoint.directory / checkpoint.files[key]}: {key} has {found:,} bytes; its hash functions address "
                f"{rows:,} rows of {size}, which are {rows * size:,}. Use the config.json that belongs to the checkpoint"
            )
    return groups


def load_table(
    checkpoint: Checkpoint, prefix: str, table: Table, threads: int = 1, progress: Progress | None = None
) -> None:
    """Fill ``table`` from ``<prefix>.weight`` and ``<prefix>.scale``.

    Only this rank's rows are read, by ``threads`` threads, with no copy but the page cache's. ``progress`` is called with
    bytes done and bytes in all. Raises CheckpointError when a file cannot be read, or has become shorter.
    """
    done = _Done(sum(table.part_sizes.values()), progress)
    for part, size in part_bytes(table.shard.dim, table.groups).items():
        location = checkpoint.locations[f"{prefix}.{part}"]
        path, first = checkpoint.directory / location.file, location.offset + table.shard.first_row * size
        descriptor = _opened(path)
        try:
            if not table.concurrent:
                for offset, place in table.spans(part):
                    done.add(_fill(path, descriptor, first + offset, place))
                continue
            slices = [
                (first + offset + at, place[at : at + SLICE])
                for offset, place in table.spans(part)
                for at in range(0, len(place), SLICE)
            ]
            with ThreadPoolExecutor(threads, thread_name_prefix="dsv41-load") as pool:
                jobs = [pool.submit(lambda at, to: done.add(_fill(path, descriptor, at, to)), *one) for one in slices]  # noqa: B023
                try:
                    for job in jobs:
                        job.result()
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
        finally:
            os.close(descriptor)


class _Done:
    """Counts bytes, from any thread."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress, self._bytes, self._lock = total, progress, 0, threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self._bytes += size
            if self._progress is not None:
                self._progress(self._bytes, self._total)


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror})") from error


def _fill(path: Path, descriptor: int, offset: int, place: Bytes) -> int:
    """Read from a byte of the file on until ``place`` is full."""
    done = 0
    while done < len(place):
        try:
            count = os.preadv(descriptor, [place[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read at byte {offset + done} ({error.strerror})") from error
        if count == 0:
            raise CheckpointError(f"{path}: ends before byte {offset + done}, it was cut meanwhile; fetch it again")
        done += count
    return done
