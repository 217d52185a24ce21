"""All checks of one checkpoint, in the order in which they depend on each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..quant import Checkpoint, CheckpointError, Layout, open_checkpoint
from ..quant.convert import open_source
from . import manifest
from .constants import check_constants
from .numbers import check_values, compare
from .report import Report
from .state import check_config, check_rotation, check_source
from .structure import check_description, check_files, check_index, check_links

SAMPLE = 2
"""Blocks of 32 rows per tensor that are looked at if not said otherwise."""


def verify(
    directory: str | Path,
    against: str | Path | None = None,
    sample: int | None = SAMPLE,
    *,
    check_manifest: Path | None = None,
    quiet: bool = True,
) -> Report:
    """Check a checkpoint of either layout.

    ``against``: the official checkpoint that it was converted from; ``sample``: blocks of 32 rows looked at per
    tensor, None for all; ``check_manifest``: file of ``sha256sum`` lines; ``quiet``: no progress bars.
    Raises CheckpointError and ConfigError for a directory that is no checkpoint at all, or a bad ``against`` or
    ``check_manifest``; everything else is a finding.
    """
    directory = Path(directory)
    report = Report(str(directory))
    source = None if against is None else open_source(against)
    if check_manifest is not None:
        manifest.read(check_manifest)
    if directory.is_dir():
        check_links(directory, report)
    checkpoint = _open(directory, report)
    if checkpoint is not None:
        checks: dict[str, Callable[[Checkpoint, Report], None]] = {
            "files": check_files,
            "index": check_index,
            "constants": check_constants,
            "config": check_config,
        }
        if checkpoint.layout is Layout.ASCEND:
            checks |= {"labels": check_description, "rotation": check_rotation}
        for name, check in checks.items():
            _attempt(name, report, lambda check=check: check(checkpoint, report))  # type: ignore[misc]
        _attempt("values", report, lambda: check_values(checkpoint, sample, report, quiet))
        if checkpoint.layout is Layout.ASCEND:
            _attempt("numbers", report, lambda: _numbers(checkpoint, source, sample, report, quiet))
    if check_manifest is not None:
        path = check_manifest
        _attempt("manifest", report, lambda: manifest.check(directory, path, report, quiet))
    return report


def _attempt(name: str, report: Report, check: Callable[[], None]) -> None:
    """A file that cannot be read fails its check, and the others' findings are kept."""
    try:
        check()
    except (OSError, CheckpointError) as error:
        report.add(name, [str(error)], "")


def _open(directory: Path, report: Report) -> Checkpoint | None:
    """Structure: names, forms, labels, shard bounds, complete files."""
    if not (directory / "config.json").is_file():
        open_checkpoint(directory)  # raises: not a checkpoint
    try:
        checkpoint = open_checkpoint(directory)
    except (OSError, CheckpointError) as error:
        report.add("structure", [str(error)], "")
        for check in ("files", "index", "constants", "config", "values", "numbers"):
            report.skip(check, "the structure must hold first")
        return None
    layout = checkpoint.layout.value + (f" {checkpoint.weights.value}" if checkpoint.weights else "")
    report.add("structure", [], f"{layout}: {len(checkpoint.files):,} tensors of the right form")
    return checkpoint


def _numbers(
    checkpoint: Checkpoint, source: Checkpoint | None, sample: int | None, report: Report, quiet: bool
) -> None:
    if source is None:
        report.skip("numbers", "no source given (--against)")
    elif check_source(checkpoint, source, report):
        compare(checkpoint, source, sample, report, quiet)
    else:
        report.skip("numbers", "text_config is not the source's")
