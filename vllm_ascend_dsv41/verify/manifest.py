"""SHA-256 of every file, in the format of ``sha256sum``."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from ..quant import CheckpointError
from .files import entries
from .report import Report

CHUNK = 8 << 20
ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")


def digests(directory: Path, apart: Path, quiet: bool) -> dict[str, str]:
    """Relative path -> SHA-256 of every file below ``directory`` but ``apart``, several at a time."""
    paths = [path for path in entries(directory) if path.is_file() and path.resolve() != apart.resolve()]
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
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return result.hexdigest()

        return dict(zip((str(path.relative_to(directory)) for path in paths), pool.map(digest, paths), strict=True))


def refuse_existing(path: Path) -> None:
    """Raises CheckpointError where a manifest cannot be written without destroying something."""
    if path.exists():
        raise CheckpointError(f"{path}: exists already; remove it, or check against it with --check-manifest")
    if not path.absolute().parent.is_dir():
        raise CheckpointError(f"{path.absolute().parent}: no such directory; create it first")


def write(directory: Path, path: Path, quiet: bool) -> int:
    """Write the manifest of ``directory``; returns the number of files. It may lie inside, and does not name itself."""
    refuse_existing(path)
    lines = []
    for name, digest in digests(directory, path, quiet).items():
        escaped = "".join(ESCAPES.get(character, character) for character in name)
        lines.append(f"{'' if escaped == name else chr(92)}{digest}  {escaped}\n")
    with tempfile.NamedTemporaryFile(  # names that are not UTF-8 keep their bytes
        "w", dir=path.absolute().parent, prefix=f".{path.name}.", errors="surrogateescape", delete=False
    ) as file:
        file.writelines(lines)
    os.chmod(file.name, 0o644)
    os.rename(file.name, path)
    return len(lines)


def read(path: Path) -> dict[str, str]:
    """Relative path -> digest. Raises CheckpointError."""
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    result: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line:
            continue
        match = LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(f"{path}: line {number} is not of the form that sha256sum writes")
        name = match[3]
        if match[1]:
            name = re.sub(r"\\([\\nr])", lambda found: {"n": "\n", "r": "\r"}.get(found[1], "\\"), name)
        name, digest = os.path.normpath(name), match[2].lower()
        if result.setdefault(name, digest) != digest:
            raise CheckpointError(f"{path}: line {number} names {name} again, with another digest")
    return result


def check(directory: Path, path: Path, report: Report, quiet: bool) -> None:
    """One finding: files changed, missing or new since the manifest was written. Raises CheckpointError."""
    wanted = read(path)
    found = digests(directory, path, quiet)
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is not in the manifest" for name in found if name not in wanted]
    problems += [f"{name} has changed" for name in wanted if name in found and found[name] != wanted[name]]
    report.add("manifest", problems, f"{len(wanted)} files are as {path} says")
