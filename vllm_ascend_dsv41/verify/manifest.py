"""SHA-256 of every file, in the format of ``sha256sum``."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from ..quant import CheckpointError
from .report import Report

CHUNK = 8 << 20


def digests(directory: Path, quiet: bool) -> dict[str, str]:
    """Relative path -> SHA-256 of every file below ``directory``, several at a time."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    total = sum(path.stat().st_size for path in paths)
    with (
        tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="sha256", disable=quiet) as bar,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,  # hashlib works outside the interpreter lock
    ):

        def digest(path: Path) -> str:
            result = hashlib.sha256()
            with path.open("rb", buffering=0) as file:
                while data := file.read(CHUNK):
                    result.update(data)
                    bar.update(len(data))
            return result.hexdigest()

        return dict(zip((str(path.relative_to(directory)) for path in paths), pool.map(digest, paths), strict=True))


def write(directory: Path, path: Path, quiet: bool) -> int:
    """Write the manifest of ``directory``; returns the number of files. Raises CheckpointError if ``path`` exists."""
    if path.exists():
        raise CheckpointError(f"{path}: exists already; remove it, or check against it with --check-manifest")
    if path.resolve().is_relative_to(directory.resolve()):
        raise CheckpointError(f"{path}: lies inside the checkpoint, which it would change; name a place outside")
    lines = [f"{digest}  {name}\n" for name, digest in digests(directory, quiet).items()]
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text("".join(lines), encoding="utf-8")
    temporary.rename(path)
    return len(lines)


def check(directory: Path, path: Path, report: Report, quiet: bool) -> None:
    """One finding: files changed, missing or new since the manifest was written. Raises CheckpointError."""
    wanted = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        digest, separator, name = line.partition("  ")
        if not separator or len(digest) != 64:
            raise CheckpointError(f"{path}: line {number} is not of the form that sha256sum writes")
        wanted[name] = digest
    found = digests(directory, quiet)
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is not in the manifest" for name in found if name not in wanted]
    problems += [f"{name} has changed" for name in wanted if name in found and found[name] != wanted[name]]
    report.add("manifest", problems, f"{len(wanted)} files are as {path} says")
