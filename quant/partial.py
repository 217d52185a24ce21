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
GONE = "-gone"
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
    lock = partial / LOCK
    try:
        partial.mkdir(exist_ok=True)
        names = os.listdir(partial)
        if names and LOCK not in names:
            raise CheckpointError(f"{partial}: is no remainder of a conversion; move it away")
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except FileNotFoundError as error:  # the other one has just finished, and removed it
        raise _busy(target) from error
    except OSError as error:
        raise CheckpointError(f"{partial}: cannot be made ({error.strerror})") from error
    try:
        _take(descriptor, lock, target)
        yield partial
    finally:
        os.close(descriptor)


def publish(partial: Path, target: Path) -> None:
    """Give the contents their final name, durably. Raises CheckpointError when something else has that name."""
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
    """Clear everything away. Renamed first: at any moment the directory has all it had, or it is not there."""
    gone = partial.with_name(f"{partial.name}{GONE}")
    shutil.rmtree(gone, ignore_errors=True)
    partial.rename(gone)
    shutil.rmtree(gone)


def clear(target: Path) -> None:
    """What a process left that was killed in ``remove``."""
    if target.name:
        shutil.rmtree(target.with_name(f"{partial_path(target).name}{GONE}"), ignore_errors=True)


def _busy(target: Path) -> CheckpointError:
    return CheckpointError(f"{target}: another conversion is writing it; wait or name another target")


def _take(descriptor: int, lock: Path, target: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # the other one may have finished, and removed its lock file, between our open and our lock
        if os.fstat(descriptor).st_ino != lock.stat().st_ino:
            raise _busy(target)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOENT):
            raise _busy(target) from error
        raise CheckpointError(f"{lock}: cannot be locked ({error.strerror})") from error
