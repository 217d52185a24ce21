"""A directory that appears under its name only when it is complete, and can be gone on with until then."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .checkpoint import CheckpointError

LOCK = "lock"  # tells a running conversion from a killed one's remains
JOURNAL = "journal"
CONTENTS = "checkpoint"  # what becomes the target


def partial_path(target: Path) -> Path:
    """The hidden directory beside ``target`` that holds the lock, the journal and the contents so far."""
    return target.with_name(f".{target.name}.dsv41-partial")


@contextmanager
def partial_directory(target: Path) -> Iterator[Path]:
    """``partial_path(target)``, locked for this process. Raises CheckpointError.

    A directory of that name that no conversion made is refused, as is one that another process is writing.
    """
    partial = partial_path(target)
    try:
        partial.mkdir(exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{partial}: cannot be made ({error.strerror})") from error
    lock = partial / LOCK
    if not lock.exists() and any(partial.iterdir()):
        raise CheckpointError(f"{partial}: is no remainder of a conversion; move it away")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CheckpointError(f"{lock}: cannot be made ({error.strerror})") from error
    try:
        _take(descriptor, lock, target)
        yield partial
    finally:
        os.close(descriptor)


def publish(partial: Path, target: Path) -> None:
    """Give the contents their final name, durably. Raises CheckpointError when something has that name."""
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target}: was made by somebody else meanwhile; it is left alone")
    for directory in [path for path in (partial / CONTENTS).rglob("*") if path.is_dir()]:
        sync(directory)
    sync(partial / CONTENTS)
    (partial / CONTENTS).rename(target)
    sync(target.absolute().parent)


def sync(path: Path) -> None:
    """Wait until a file or directory is on the disk, and let its pages leave the cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if path.is_file():
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def remove(partial: Path) -> None:
    """Clear everything away, the lock last: until then nobody else begins."""
    for path in partial.iterdir():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (partial / LOCK).unlink()
    partial.rmdir()


def _take(descriptor: int, lock: Path, target: Path) -> None:
    busy = CheckpointError(f"{target}: another conversion is writing it; wait or name another target")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise busy from error
        raise CheckpointError(f"{lock}: cannot be locked ({error.strerror})") from error
    # the other one may have finished, and removed its lock file, between our open and our lock
    if not lock.exists() or os.fstat(descriptor).st_ino != lock.stat().st_ino:
        raise busy
