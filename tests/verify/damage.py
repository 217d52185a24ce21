"""Checkpoints to damage, and what `dsv41 verify` says of them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_ascend_dsv41.verify import verify

INDEX = "quant_model_weights.safetensors.index.json"
DESCRIPTION = "quant_model_description.json"
SHARD = "quant_model_weights-00001-of-00001.safetensors"


def edit_json(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.unlink()
    path.write_text(json.dumps(value))


def edit_tensors(path: Path, change) -> None:
    data = load_file(path)
    change(data)
    path.unlink()
    save_file(data, path)


def rotation_file(directory: Path, change) -> None:
    edit_tensors(directory / "optional/quarot.safetensors", lambda data: change(data["global_rotation"]))


def nan(tensor: torch.Tensor) -> None:
    tensor.view(-1)[0] = float("nan")


def failed(directory: Path, against: Path | None = None, sample: int | None = None) -> dict[str, str]:
    """Check -> detail of everything that failed."""
    report = verify(directory, against, sample)
    assert report.holds == (not any(finding.verdict == "FAIL" for finding in report.findings))
    return {finding.check: finding.detail for finding in report.findings if finding.verdict == "FAIL"}
