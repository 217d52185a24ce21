"""Reading a table from safetensors straight into its place."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from ..native.threads import executor
from ..quant import Checkpoint, CheckpointError, Weights
from ..quant.checkpoint import Location, read_header
from .memory import Bytes
from .storage import Table, part_bytes

SLICE = 8 << 20  # bytes that a thread reads at once
GROUP = 32  # values that share a scale
Progress = Callable[[int, int], None]


def table_groups(checkpoint: Checkpoint, prefix: str, primes: Tensor, dim: int) -> int:
    """Scales of a row of the table ``<prefix>.weight``, 0 for a BF16 table.

    primes: bucket counts of its hash functions. Raises CheckpointError where the data of the file are not the rows that
    these address, before memory is taken: other rows give plausible text. (``open_checkpoint`` has compared dtypes and
    shapes with the config.)
    """
    groups = 0 if checkpoint.weights is Weights.BF16 else dim // GROUP
    for part, size in part_bytes(dim, groups).items():
        key, rows = f"{prefix}.{part}", int(primes.sum())
        found = checkpoint.locations[key].bytes
        if found != rows * size:
            raise CheckpointError(
                f"{checkpoint.directory / checkpoint.files[key]}: {key} has {found:,} bytes; its hash functions "
                f"address {rows:,} rows of {size}, which are {rows * size:,}. Use the config.json that "
                "belongs to the checkpoint"
            )
    return groups


def load_table(
    checkpoint: Checkpoint, prefix: str, table: Table, threads: int = 1, progress: Progress | None = None
) -> None:
    """Fill ``table`` from ``<prefix>.weight`` and ``<prefix>.scale``.

    Only this rank's rows are read, by ``threads`` threads, with no copy but the page cache's. ``progress`` is called
    with bytes done and bytes in all. Raises CheckpointError when a file cannot be read, or has become shorter.
    """
    done = _Done(sum(table.part_sizes.values()), progress)
    for part, size in part_bytes(table.shard.dim, table.groups).items():
        location = checkpoint.locations[f"{prefix}.{part}"]
        _check_header(checkpoint.directory / location.file, f"{prefix}.{part}", location)
        start = location.offset + table.shard.first_row * size
        with _File(checkpoint.directory / location.file, done) as file:
            if table.concurrent:
                _fill_in_parallel(file, start, table.spans(part), threads)
            else:
                for offset, place in table.spans(part):
                    file.fill(start + offset, place)


def _check_header(path: Path, key: str, expected: Location) -> None:
    """The file may have been exchanged since the checkpoint was opened: other offsets would give other rows."""
    stored, offset = read_header(path).get(key, (None, 0))
    if stored is None or (offset, stored.bytes) != (expected.offset, expected.bytes):
        raise CheckpointError(f"{path}: {key} has moved since the checkpoint was checked; do not change it meanwhile")


def _fill_in_parallel(file: _File, start: int, spans: Iterable[tuple[int, Bytes]], threads: int) -> None:
    with executor(threads) as pool:
        jobs = [
            pool.submit(file.fill, start + offset + at, place[at : at + SLICE])
            for offset, place in spans
            for at in range(0, len(place), SLICE)
        ]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class _Done:
    """Counts bytes, from any thread."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress, self._bytes, self._lock = total, progress, 0, threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self._bytes += size
            if self._progress is not None:
                self._progress(self._bytes, self._total)


class _File:
    """A file to be read at any place by any thread."""

    def __init__(self, path: Path, done: _Done) -> None:
        self._path, self._done = path, done

    def __enter__(self) -> _File:
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be opened ({error.strerror})") from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def fill(self, begin: int, place: Bytes) -> None:
        """Read from byte ``begin`` on until ``place`` is full."""
        at = 0
        while at < len(place):
            try:
                count = os.preadv(self._descriptor, [place[at:].data], begin + at)
            except OSError as error:
                raise CheckpointError(
                    f"{self._path}: cannot be read at byte {begin + at} ({error.strerror})"
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"{self._path}: ends before byte {begin + at}, it was cut meanwhile; fetch it again"
                )
            at += count
        self._done.add(at)
