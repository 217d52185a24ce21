"""Config and rotation: what the index cannot tell."""

from __future__ import annotations

import json

import numpy as np
import torch
from safetensors import safe_open

from ..quant import Checkpoint, CheckpointError, Layout
from ..quant.checkpoint import DESCRIPTION
from ..quant.describe import ENGRAM_ROTATION
from ..quant.inventory import Kind, draft_copies
from ..quant.rotation import BLOCK, KEY, read_block, rotation_of
from ..quant.rotation import FILE as ROTATION_FILE
from .report import Report

FOREIGN_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quant_log.json", "recipe.yaml")
FOREIGN_KEYS = ("compression_config", "quantization", "quantize_config", "auto_map")
SAMPLED_ROWS = 64


def check_config(checkpoint: Checkpoint, report: Report) -> None:
    """Limits, token ids, and leftovers of other quantisers."""
    config, text = checkpoint.config, checkpoint.config["text_config"]
    problems = [
        f"{name} belongs to another quantiser; a loader may believe it. Remove it"
        for name in FOREIGN_FILES
        if (checkpoint.directory / name).exists()
    ]
    for part, values in (("config.json", config), ("text_config", text)):
        problems += [f"{part}: {key} belongs to another tool; remove it" for key in FOREIGN_KEYS if key in values]
    if "quantization_config" in text:
        problems.append("text_config: has a quantization_config of its own; remove it")
    scaling = text["rope_scaling"]
    limit = scaling["factor"] * scaling["original_max_position_embeddings"]
    if not 0 < text["max_position_embeddings"] <= limit:
        problems.append(f"max_position_embeddings = {text['max_position_embeddings']}, YaRN reaches {limit}")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        value = config.get(key)
        if value is not None and not 0 <= value < text["vocab_size"]:
            problems.append(f"{key} = {value} is outside the vocabulary of {text['vocab_size']}")
    if config.get("dtype", "bfloat16") != "bfloat16":
        problems.append(f"dtype = {config['dtype']!r}, expected 'bfloat16'")
    problems += [
        f"{name} is missing; copy it from the source"
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
        if not (checkpoint.directory / name).is_file()
    ]
    if checkpoint.layout is Layout.ASCEND:
        problems += _quantization(checkpoint)
    report.add(
        "config", problems, f"positions up to {text['max_position_embeddings']:,}, no leftovers of other quantisers"
    )


def _quantization(checkpoint: Checkpoint) -> list[str]:
    description = json.loads((checkpoint.directory / DESCRIPTION).read_text(encoding="utf-8"))
    wanted = {"quant_method": "ascend", "model_quant_type": description["model_quant_type"]}
    problems = []
    if checkpoint.config.get("quantization_config") != wanted:
        problems.append(f"quantization_config = {checkpoint.config.get('quantization_config')}, expected {wanted}")
    if checkpoint.config.get("engram_rotation_config") != ENGRAM_ROTATION:
        found = checkpoint.config.get("engram_rotation_config")
        problems.append(f"engram_rotation_config = {found}, expected {ENGRAM_ROTATION}")
    return problems


def check_rotation(checkpoint: Checkpoint, report: Report) -> None:
    """The rotation matrix, and that weights agree with it: norms folded, and the draft's copies not rotated."""
    hidden = checkpoint.config["text_config"]["hidden_size"]
    description = json.loads((checkpoint.directory / DESCRIPTION).read_text(encoding="utf-8"))
    optional = description.get("optional")
    named = (
        optional.get("quarot", {}).get("rotation_map", {}).get("global_rotation")
        if isinstance(optional, dict)
        else None
    )
    if named != ROTATION_FILE:
        report.add("rotation", [f"{DESCRIPTION} names rotation file {named!r}, expected {ROTATION_FILE!r}"], "")
        return
    try:
        block = read_block(checkpoint.directory / ROTATION_FILE, hidden)
    except CheckpointError as error:
        report.add("rotation", [str(error)], "")
        return
    size = min(BLOCK, hidden)
    problems = _matrix(checkpoint, np.eye(size, dtype=np.float32) if block is None else block, hidden)
    if block is not None:
        problems += _folded(checkpoint)
    problems += _copies(checkpoint, block)
    report.add("rotation", problems, "none (identity)" if block is None else "QuaRot, norms folded, draft unrotated")


def _matrix(checkpoint: Checkpoint, block: np.ndarray, hidden: int) -> list[str]:
    path, size = checkpoint.directory / ROTATION_FILE, len(block)
    problems = []
    if np.abs(block @ block.T - np.eye(size)).max() > 1e-5:
        problems.append(f"{path}: its block is not orthogonal")
    with safe_open(path, framework="np") as file:
        stripes = file.get_slice(KEY)
        for begin in range(0, hidden, size):
            wanted = np.zeros((size, hidden), np.float32)
            wanted[:, begin : begin + size] = block
            if not np.array_equal(stripes[begin : begin + size], wanted):
                problems.append(f"{path}: rows {begin} to {begin + size} do not repeat the first block on the diagonal")
                break
    return problems


def _folded(checkpoint: Checkpoint) -> list[str]:
    problems = []
    for spec in checkpoint.tensors:
        rotation = rotation_of(spec, checkpoint.config)
        if rotation is not None and rotation.ones and not bool((_rows(checkpoint, spec.name) == 1).all()):
            problems.append(f"{spec.name} is not all ones: a norm weight must be folded before the streams are rotated")
    return problems


def _copies(checkpoint: Checkpoint, block: np.ndarray | None) -> list[str]:
    """The draft's embedding and head are the trunk's before rotation."""
    problems, kinds = [], {spec.name: spec.kind for spec in checkpoint.tensors}
    for copy in draft_copies(checkpoint.config):
        own, trunk = _rows(checkpoint, copy.name), _rows(checkpoint, copy.source)
        if block is not None:
            if copy.source == "head.weight":
                continue  # the final norm is folded into the trunk's: comparing needs the source (--against)
            own = (own.unflatten(1, (-1, len(block))) @ torch.from_numpy(block)).flatten(1)
        tolerance = 0.0 if block is None else 2.0**-8 * float(own.abs().max())
        if (own - trunk).abs().max() > tolerance:
            problems.append(
                f"{copy.name} is not {copy.source} {'' if block is None else 'before its rotation'}".rstrip()
            )
        assert kinds[copy.source] in (Kind.BF16, Kind.WIDENED)
    return problems


def _rows(checkpoint: Checkpoint, key: str) -> torch.Tensor:
    """Some rows of a tensor, float32."""
    with safe_open(checkpoint.directory / checkpoint.files[key], framework="pt") as file:
        rows: torch.Tensor = (
            file.get_slice(key)[:SAMPLED_ROWS] if len(file.get_slice(key).get_shape()) > 1 else file.get_tensor(key)
        )
    return rows.float()
