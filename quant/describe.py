"""The small files of the Ascend layout: description, index, config, rotation, and what is copied."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from . import rotation
from .checkpoint import ASCEND_INDEX, DESCRIPTION, CheckpointError, description_labels
from .inventory import Stored, Weights
from .plan import Plan
from .safetensors_writer import header

ENGRAM_ROTATION = {  # what a loader written for ModelSlim's rotated checkpoints must find, also when R is the identity
    "value_projection_rotated": True,
    "value_basis": "quarot_global",
    "key_and_gate_basis": "original",
    "runtime_delta_rotation": False,
}


def quant_type(weights: Weights) -> str:
    """What the description and the config call it."""
    return "W8A8_DYNAMIC" if weights is Weights.W8A8 else "FLOAT"


def side_files(directory: Path) -> list[Path]:
    """Tokenizer and other small files that belong to the checkpoint and are not rewritten. Raises CheckpointError."""
    own = {"config.json", DESCRIPTION}
    for path in sorted(directory.iterdir()):
        if path.is_symlink() and not path.exists():
            raise CheckpointError(f"{path}: leads nowhere ({path.readlink()}); download it again, or remove the link")
    found = [
        path
        for path in sorted(directory.iterdir())
        if path.is_file()
        and path.suffix != ".safetensors"
        and not path.name.endswith(".index.json")
        and path.name not in own
    ]
    for path in found:
        if not os.access(path, os.R_OK):
            raise CheckpointError(f"{path}: cannot be read; change its permissions")
        if path.name == rotation.FILE.partition("/")[0]:
            raise CheckpointError(f"{path}: has the name of a folder that the conversion makes; move it away")
    return found


def small_bytes(copied: list[Path], config: Mapping[str, Any], plan: Plan) -> int:
    """Room for everything but tensor data, generously."""
    names = sum(2 * len(stored.key) + 300 for file in plan.files for stored in file.tensors)  # headers, index, labels
    matrix = 4 * int(config["text_config"]["hidden_size"]) ** 2
    return int(names + matrix) + sum(path.stat().st_size for path in copied) + (1 << 20)


def write_small_files(
    directory: Path, copied: list[Path], config: Mapping[str, Any], weights: Weights, rotated: bool, plan: Plan
) -> list[Path]:
    """Write everything but the weights into ``directory``; the index and the config come last. Returns the paths."""
    for path in copied:
        shutil.copyfile(path, directory / path.name)
    _write_rotation(directory / rotation.FILE, config["text_config"]["hidden_size"], rotated)
    description = {
        "version": "1.0.0",
        "model_quant_type": quant_type(weights),
        "group_size": 0,
        "metadata": {},
        "optional": {"quarot": {"rotation_map": {"global_rotation": rotation.FILE}}},
        **description_labels(config, weights),
    }
    _write_json(directory / DESCRIPTION, description)
    weight_map = {stored.key: file.name for file in plan.files for stored in file.tensors}
    _write_json(directory / ASCEND_INDEX, {"metadata": {"total_size": plan.bytes}, "weight_map": weight_map})
    quantization = {"quant_method": "ascend", "model_quant_type": quant_type(weights)}
    _write_json(
        directory / "config.json",
        {**config, "quantization_config": quantization, "engram_rotation_config": ENGRAM_ROTATION},
    )
    names = [*(path.name for path in copied), rotation.FILE, DESCRIPTION, ASCEND_INDEX, "config.json"]
    return [directory / name for name in names]


def _write_rotation(path: Path, hidden: int, rotated: bool) -> None:
    """The whole matrix [hidden, hidden], a stripe at a time: readers use its first block, and check the shape."""
    path.parent.mkdir(exist_ok=True)
    size = rotation.BLOCK if rotated else 1
    block = rotation.block() if rotated else np.ones((1, 1), np.float32)
    with path.open("wb") as file:
        file.write(header([Stored(rotation.KEY, "F32", (hidden, hidden))])[0])
        for begin in range(0, hidden, size):
            stripe = np.zeros((size, hidden), np.float32)
            stripe[:, begin : begin + size] = block
            file.write(stripe.data)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
