"""All checks of one checkpoint, in the order in which they depend on each other."""

from __future__ import annotations

from pathlib import Path

from ..quant import Checkpoint, CheckpointError, Layout, open_checkpoint
from ..quant.convert import open_source
from . import manifest
from .constants import check_constants
from .numbers import compare
from .report import Report
from .state import check_config, check_rotation
from .structure import check_description, check_files, check_index, check_links

SAMPLE = 2
"""Blocks of 32 rows per tensor that are compared if not said otherwise."""


def verify(
    directory: str | Path,
    against: str | Path | None = None,
    sample: int | None = SAMPLE,
    *,
    check_manifest: Path | None = None,
    quiet: bool = True,
) -> Report:
    """Check a checkpoint of either layout.

    ``against``: the official checkpoint that it was converted from; ``sample``: blocks of 32 rows compared per
    tensor, None for all; ``check_manifest``: file of ``sha256sum`` lines; ``quiet``: no progress bars.
    Raises CheckpointError and ConfigError for a directory that is no checkpoint at all, or a bad ``against``;
    everything else is a finding.
    """
    directory = Path(directory)
    report = Report(str(directory))
    source = None if against is None else open_source(against)
    if directory.is_dir():
        check_links(directory, report)
    checkpoint = _open(directory, report)
    if checkpoint is not None:
        check_files(checkpoint, report)
        check_index(checkpoint, report)
        check_constants(checkpoint, report)
        check_config(checkpoint, report)
        if checkpoint.layout is Layout.ASCEND:
            check_description(checkpoint, report)
            check_rotation(checkpoint, report)
            if source is None:
                report.skip("numbers", "no source given (--against)")
            else:
                _compare(checkpoint, source, sample, report, quiet)
    if check_manifest is not None:
        manifest.check(directory, check_manifest, report, quiet)
    return report


def _open(directory: Path, report: Report) -> Checkpoint | None:
    """Structure: names, forms, labels, shard bounds, complete files."""
    if not (directory / "config.json").is_file():
        open_checkpoint(directory)  # raises: not a checkpoint
    try:
        checkpoint = open_checkpoint(directory)
    except CheckpointError as error:
        report.add("structure", [str(error)], "")
        for check in ("files", "index", "constants", "config", "numbers"):
            report.skip(check, "the structure must hold first")
        return None
    weights = f" {checkpoint.weights.value}" if checkpoint.weights else ""
    report.add(
        "structure", [], f"{checkpoint.layout.value}{weights}: {len(checkpoint.files):,} tensors of the right form"
    )
    return checkpoint


def _compare(checkpoint: Checkpoint, source: Checkpoint, sample: int | None, report: Report, quiet: bool) -> None:
    mine, theirs = checkpoint.config["text_config"], source.config["text_config"]
    differs = [key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key)]
    if differs:
        report.add("numbers", [f"text_config differs from the source's in {', '.join(differs)}"], "")
        return
    compare(checkpoint, source, sample, report, quiet)
