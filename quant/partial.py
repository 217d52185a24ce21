"""An output directory that appears under its name only when it is complete."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .checkpoint import CheckpointError

LOCK = "lock"  # inside the partial directory: tells a running conversion from a killed one's remains


@contextmanager
def partial_directory(target: Path) -> Iterator[Path]:
    """A hidden directory beside ``target`` that becomes it when the block ends well, and disappears when not.

    What a killed conversion left is cleared; a directory of that name which is not such a remainder is
    refused, as is one that another process is writing. Raises CheckpointError.
    """
    partial = target.with_name(f".{target.name}.dsv41-partial")
    try:
        partial.mkdir(exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{partial}: cannot be made ({error.strerror})") from error
    lock = partial / LOCK
    if not lock.exists() and any(partial.iterdir()):
        raise CheckpointError(f"{partial}: is no remainder of a conversion; move it away")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(descriptor, lock, target)
        for path in partial.iterdir():  # of a killed conversion
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        try:
            yield partial
            if target.exists() or target.is_symlink():
                raise CheckpointError(f"{target}: was made by somebody else meanwhile; it is left alone")
            lock.unlink()
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


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
