"""Every file of a checkpoint, links followed: hub caches and hand-made folders consist of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def entries(directory: Path) -> Iterator[Path]:
    """Files and dangling links below a directory, sorted; linked directories are entered, once each."""
    seen: set[tuple[int, int]] = set()
    found = []
    for root, folders, files in os.walk(directory, followlinks=True):
        status = os.stat(root)
        if (status.st_dev, status.st_ino) in seen:  # a loop of links
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        found += [Path(root) / name for name in files]
        # a link to a directory that is gone is listed as a file; os.walk lists it so
    yield from sorted(found)
