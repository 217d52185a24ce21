"""Names, forms, files: beyond what every reader of a checkpoint checks, what a careless copy leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

from ..quant import Checkpoint, CheckpointError, Layout
from ..quant.checkpoint import ASCEND_INDEX, DESCRIPTION, OFFICIAL_INDEX, read_header
from ..quant.rotation import FILE as ROTATION_FILE
from .files import entries
from .report import Report

INDEXES = (OFFICIAL_INDEX, ASCEND_INDEX)
DESCRIPTION_KEYS = {"version", "model_quant_type", "group_size", "metadata", "optional"}


def check_links(directory: Path, report: Report) -> None:
    """Links that lead nowhere: what is left of a cache that was cleared."""
    links = [path for path in entries(directory) if path.is_symlink()]
    dangling = [f"{path.relative_to(directory)} -> {path.readlink()}" for path in links if not path.exists()]
    report.add("links", [f"dangling link {item}" for item in dangling], f"{len(links)} linked files, all there")


def check_files(checkpoint: Checkpoint, report: Report) -> None:
    """Every tensor of every weight file is in the index exactly there, and nothing else is there."""
    directory, problems, count = checkpoint.directory, [], 0
    named = set(checkpoint.files.values())
    for path in entries(directory):
        name = str(path.relative_to(directory))
        if path.suffix != ".safetensors" or name == ROTATION_FILE or not path.exists():
            continue
        if name not in named:
            problems.append(f"{name} is not in the index; a loader that takes every file reads it too. Remove it")
            continue
        try:
            keys = list(read_header(path))
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for key in keys:
            count += 1
            if checkpoint.files.get(key) != name:
                problems.append(f"{key} lies in {name}, the index says {checkpoint.files.get(key, 'nothing')}")
    report.add("files", problems, f"{len(named)} weight files hold {count} tensors, each once")


def check_index(checkpoint: Checkpoint, report: Report) -> None:
    """The index's own total, and no second index."""
    own = ASCEND_INDEX if checkpoint.layout is Layout.ASCEND else OFFICIAL_INDEX
    total = sum(location.bytes for location in checkpoint.locations.values())
    metadata = json.loads((checkpoint.directory / own).read_text(encoding="utf-8")).get("metadata", {})
    problems = []
    if not isinstance(metadata, dict):
        problems.append(f"{own}: metadata is {metadata!r}, expected an object")
    elif metadata.get("total_size", total) != total:
        problems.append(f"{own}: total_size = {metadata['total_size']}, the tensors have {total} bytes")
    others = [name for name in INDEXES if name != own and (checkpoint.directory / name).exists()]
    problems += [f"{name} lies beside {own}: readers disagree which one counts. Remove it" for name in others]
    report.add("index", problems, f"{total:,} bytes of tensors")


def check_description(checkpoint: Checkpoint, report: Report) -> None:
    """One label per tensor was checked on opening; here: no label without a tensor."""
    path = checkpoint.directory / DESCRIPTION
    keys = set(json.loads(path.read_text(encoding="utf-8"))) - DESCRIPTION_KEYS
    extra = [f"{key} is labelled, but is no tensor" for key in sorted(keys - set(checkpoint.files))]
    report.add("labels", extra, f"{len(keys)} labels, one per tensor")
