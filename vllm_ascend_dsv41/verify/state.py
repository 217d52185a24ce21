"""Config and rotation: what the index cannot tell."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..quant import Checkpoint, CheckpointError, Layout
from ..quant.checkpoint import DESCRIPTION, read_header
from ..quant.describe import ENGRAM_ROTATION
from ..quant.inventory import draft_copies
from ..quant.rotation import FILE as ROTATION_FILE
from ..quant.rotation import KEY, read_block, rotation_of
from .report import Report
from .rows import Reader

FOREIGN_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quant_log.json", "recipe.yaml")
FOREIGN_KEYS = ("compression_config", "quantization", "quantize_config", "auto_map")
SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
OWN_KEYS = {"quantization_config", "engram_rotation_config"}  # of config.json, which a conversion writes
SAMPLED_ROWS = 64


def check_config(checkpoint: Checkpoint, report: Report) -> None:
    """Limits, token ids, side files, and leftovers of other quantisers."""
    config, text = checkpoint.config, checkpoint.config["text_config"]
    problems = [
        f"{name} belongs to another quantiser; a loader may believe it. Remove it"
        for name in FOREIGN_FILES
        if (checkpoint.directory / name).exists()
    ]
    for part, values in (("config.json", config), ("text_config", text)):
        problems += [f"{part}: {key} belongs to another tool; remove it" for key in FOREIGN_KEYS if key in values]
        for key in ("dtype", "torch_dtype"):
            if values.get(key, "bfloat16") != "bfloat16":
                problems.append(f"{part}: {key} = {values[key]!r}, expected 'bfloat16'")
    if "quantization_config" in text:
        problems.append("text_config: has a quantization_config of its own; remove it")
    problems += _positions(text) + _token_ids(config)
    problems += [problem for name in SIDE_FILES if (problem := _side_file(checkpoint.directory / name))]
    if checkpoint.layout is Layout.ASCEND:
        problems += _quantization(checkpoint)
    positions = text["max_position_embeddings"]
    report.add("config", problems, f"positions up to {positions:,}, no leftovers of other quantisers")


def _positions(text: dict[str, Any]) -> list[str]:
    scaling = text["rope_scaling"]
    try:
        limit = float(scaling["factor"]) * scaling["original_max_position_embeddings"]
    except (KeyError, TypeError, ValueError, OverflowError):
        limit = math.nan
    if not 0 < text["max_position_embeddings"] <= limit:
        return [f"max_position_embeddings = {text['max_position_embeddings']}, YaRN ({scaling}) reaches {limit:g}"]
    return []


def _token_ids(config: dict[str, Any]) -> list[str]:
    problems, size = [], config["text_config"]["vocab_size"]
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        value = config.get(key)
        for item in value if isinstance(value, list) else [value]:
            if item is not None and (type(item) is not int or not 0 <= item < size):
                problems.append(f"{key} = {value!r} is outside the vocabulary of {size}")
    return problems


def _side_file(path: Path) -> str:
    """What is wrong with a JSON file beside the weights; empty if nothing."""
    if not path.is_file():
        return f"{path.name} is missing; copy it from the source"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"{path.name} cannot be read ({error}); copy it from the source"
    return "" if isinstance(content, dict) else f"{path.name} is no JSON object; copy it from the source"


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


def check_source(checkpoint: Checkpoint, source: Checkpoint, report: Report) -> bool:
    """Config and tokenizer are the source's. Returns whether the text model is: else numbers cannot be compared."""
    problems = []
    mine, theirs = checkpoint.config, source.config
    for key in sorted({*mine, *theirs} - OWN_KEYS):
        if mine.get(key) != theirs.get(key):
            problems.append(f"config.json: {key} is not the source's{_difference(mine.get(key), theirs.get(key))}")
    for name in SIDE_FILES:
        own, other = checkpoint.directory / name, source.directory / name
        if own.is_file() and other.is_file() and own.read_bytes() != other.read_bytes():
            problems.append(f"{name} is not the source's")
    report.add("source", problems, f"config and tokenizer are those of {source.directory}")
    return bool(mine["text_config"] == theirs["text_config"])


def _difference(mine: Any, theirs: Any) -> str:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return " in " + ", ".join(key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key))
    return f" ({mine!r} instead of {theirs!r})"


def check_rotation(checkpoint: Checkpoint, report: Report) -> None:
    """The matrix, and that norms and draft agree with it. Whether each weight is rotated only the source tells."""
    hidden = checkpoint.config["text_config"]["hidden_size"]
    path = checkpoint.directory / ROTATION_FILE
    description = json.loads((checkpoint.directory / DESCRIPTION).read_text(encoding="utf-8"))
    named: Any = description
    for key in ("optional", "quarot", "rotation_map", "global_rotation"):
        named = named.get(key) if isinstance(named, dict) else None
    if named != ROTATION_FILE:
        report.add("rotation", [f"{DESCRIPTION} names rotation file {named!r}, expected {ROTATION_FILE!r}"], "")
        return
    try:
        block = read_block(path, hidden)
        problems = _matrix(path, block, hidden)
    except CheckpointError as error:
        report.add("rotation", [str(error)], "")
        return
    reader = Reader(checkpoint)
    problems += _folded(checkpoint, reader, block is not None) + _copies(checkpoint, reader, block)
    found = "QuaRot: norms folded, the draft's embedding not rotated; the other weights are compared with --against"
    report.add("rotation", problems, "none (identity)" if block is None else found)


def _matrix(path: Path, block: np.ndarray | None, hidden: int) -> list[str]:
    """Orthogonal, and the block repeated along the diagonal."""
    size = 1 if block is None else len(block)
    block = np.ones((1, 1), np.float32) if block is None else block
    if not np.abs(block @ block.T - np.eye(size)).max() <= 1e-5:
        return [f"{path}: its block is not orthogonal"]
    matrix = np.memmap(path, np.float32, "r", read_header(path)[KEY][1], (hidden, hidden))
    for begin in range(0, hidden, size):
        wanted = np.zeros((size, hidden), np.float32)
        wanted[:, begin : begin + size] = block
        if not np.array_equal(matrix[begin : begin + size], wanted):
            return [f"{path}: rows {begin} to {begin + size} do not repeat the first block on the diagonal"]
    return []


def _folded(checkpoint: Checkpoint, reader: Reader, rotated: bool) -> list[str]:
    """Norm weights in front of rotated projections are ones; if none is rotated, not all of them are."""
    norms = [
        spec.name
        for spec in checkpoint.tensors
        if (rotation := rotation_of(spec, checkpoint.config)) is not None and rotation.ones
    ]
    other = [name for name in norms if not bool((reader.rows(name, 0, 1).float() == 1).all())]
    if rotated:
        return [f"{name} is not all ones: a norm weight must be folded before streams are rotated" for name in other]
    return [] if other else ["all norm weights are ones, as after a rotation, but the rotation file says identity"]


def _copies(checkpoint: Checkpoint, reader: Reader, block: np.ndarray | None) -> list[str]:
    """The draft's embedding and head are the trunk's before rotation."""
    problems = []
    for copy in draft_copies(checkpoint.config):
        if block is not None and copy.source == "head.weight":
            continue  # the final norm is folded into the trunk's: only the source tells
        own, trunk = (reader.rows(name, 0, SAMPLED_ROWS).float() for name in (copy.name, copy.source))
        before = "" if block is None else " before its rotation"
        if block is not None:
            own = (own.unflatten(1, (-1, len(block))) @ torch.from_numpy(block)).flatten(1)
        if not _close(own, trunk, 0.0 if block is None else 2.0**-8):
            problems.append(f"{copy.name} is not {copy.source}{before}")
    return problems


def _close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return bool(((found - wanted).abs() <= tolerance * wanted.abs().max()).all())
