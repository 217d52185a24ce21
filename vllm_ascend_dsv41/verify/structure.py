"""Names, forms, files: beyond what every reader of a checkpoint checks, what a careless copy leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

from ..quant import Checkpoint, CheckpointError, Layout
from ..quant.checkpoint import ASCEND_INDEX, DESCRIPTION, OFFICIAL_INDEX, read_header
from ..quant.rotation import FILE as ROTATION_FILE
from .report import Report

INDEXES = (OFFICIAL_INDEX, ASCEND_INDEX)


def check_links(directory: Path, report: Report) -> None:
    """Links that lead nowhere: what is left of a cache that was cleared."""
    links = [path for path in sorted(directory.rglob("*")) if path.is_symlink()]
    dangling = [f"{path.relative_to(directory)} -> {path.readlink()}" for path in links if not path.exists()]
    report.add("links", [f"dangling link {item}" for item in dangling], f"{len(links)} links, all lead somewhere")


def check_files(checkpoint: Checkpoint, report: Report) -> None:
    """Every tensor of every weight file is in the index exactly there, and nothing else is there."""
    directory, problems, count = checkpoint.directory, [], 0
    named = set(checkpoint.files.values())
    for path in sorted(directory.rglob("*.safetensors")):
        name = str(path.relative_to(directory))
        if name == ROTATION_FILE:
            continue
        if name not in named:
            problems.append(
                f"{name} is not in the index; a loader that takes every file reads it all the same. Remove it"
            )
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
    metadata = json.loads((checkpoint.directory / own).read_text(encoding="utf-8")).get("metadata") or {}
    problems = []
    if metadata.get("total_size", total) != total:
        problems.append(f"{own}: total_size = {metadata['total_size']}, the tensors have {total} bytes")
    others = [name for name in INDEXES if name != own and (checkpoint.directory / name).exists()]
    problems += [f"{name} lies beside {own}: readers disagree which one counts. Remove it" for name in others]
    report.add("index", problems, f"{total:,} bytes of tensors")


def check_description(checkpoint: Checkpoint, report: Report) -> None:
    """One label per tensor was checked on opening; here: no label without a tensor."""
    path = checkpoint.directory / DESCRIPTION
    labels = json.loads(path.read_text(encoding="utf-8"))
    found = [key for key, value in labels.items() if value in ("W8A8_DYNAMIC", "FLOAT") and key != "model_quant_type"]
    extra = [f"{key} is labelled, but is no tensor" for key in found if key not in checkpoint.files]
    report.add("labels", extra, f"{len(found)} labels, one per tensor")
