"""Recognising and checking a checkpoint directory without reading its data."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ..layer_plan import ConfigError, ModelPlan
from .inventory import DTYPE_BYTES, Stored, TensorSpec, Weights, draft_copies, inventory

OFFICIAL_INDEX = "model.safetensors.index.json"
ASCEND_INDEX = "quant_model_weights.safetensors.index.json"
DESCRIPTION = "quant_model_description.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
SHOWN = 5  # how many problems of a kind a message lists


class CheckpointError(ValueError):
    """A directory that is not the checkpoint it should be: what was found, where, and what to do."""


class Layout(Enum):
    """The two layouts that this package knows."""

    OFFICIAL = "official"  # MXFP4/MXFP8, as DeepSeek released it
    ASCEND = "ascend"  # INT8 or BF16, as ``dsv41 quantize`` writes it


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error


def read_config(directory: str | Path) -> dict[str, Any]:
    """``config.json`` of a DeepSeek-V4.1 checkpoint. Raises CheckpointError, ConfigError."""
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory; give the directory of a DeepSeek-V4.1 checkpoint")
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory}: not a checkpoint, config.json is missing")
    config = _read_json(path)
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind != "deepseek_v41" or not isinstance(config.get("text_config"), dict):
        raise CheckpointError(f"{path}: model_type is {kind!r}, expected 'deepseek_v41' with a text_config")
    try:
        ModelPlan.from_config(config)
    except ConfigError as error:
        raise ConfigError(f"{directory}/{error}") from error
    return dict(config)


def identify(directory: str | Path) -> Layout:
    """Which layout a directory holds, from its index files alone. Raises CheckpointError."""
    directory = Path(directory)
    if (directory / ASCEND_INDEX).is_file():
        return Layout.ASCEND
    if (directory / OFFICIAL_INDEX).is_file():
        return Layout.OFFICIAL
    raise CheckpointError(f"{directory}: not a checkpoint, neither {OFFICIAL_INDEX} nor {ASCEND_INDEX} is there")


@dataclass(frozen=True)
class Location:
    """Where a tensor's data lie: file relative to the checkpoint, first byte in it, number of bytes."""

    file: str
    offset: int
    bytes: int


def read_header(path: Path) -> dict[str, tuple[Stored, int]]:
    """Key -> form, and first byte of the data, of every tensor of a safetensors file. Raises CheckpointError.

    Every entry must be well formed, the data must follow each other without gap or overlap, and the file
    must be as long as its header says: a cut download has a valid header.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length + 8 > size:
                raise CheckpointError(f"{path}: {size} bytes, too short for a safetensors file; download it again")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path}: a header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed")
            header = json.loads(file.read(length).decode("utf-8"), parse_constant=_no_number)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: its safetensors header is damaged ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its safetensors header is damaged (not an object)")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: its safetensors header is damaged (__metadata__ is not made of strings)")
    spans = sorted((_entry(path, key, entry) for key, entry in header.items()), key=lambda item: item[1])
    end = 0
    for stored, (begin, stop) in spans:
        if begin != end or stop - begin != stored.bytes:
            raise CheckpointError(f"{path}: {stored.key} lies at bytes {begin} to {stop}, which cannot be right")
        end = stop
    if 8 + length + end != size:
        raise CheckpointError(f"{path}: {size} bytes, its header promises {8 + length + end}; download it again")
    return {stored.key: (stored, 8 + length + begin) for stored, (begin, _) in spans}


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _entry(path: Path, key: str, entry: Any) -> tuple[Stored, tuple[int, int]]:
    try:
        dtype, shape, (begin, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, stop]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the header entry of {key} is damaged") from error
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES or not all(type(n) is int and n >= 0 for n in numbers):
        raise CheckpointError(f"{path}: the header entry of {key} is damaged: {entry}")
    return Stored(key, dtype, tuple(shape)), (begin, stop)


@dataclass(frozen=True)
class Checkpoint:
    """A directory whose every tensor was found to have the expected name, dtype and shape."""

    directory: Path
    layout: Layout
    weights: Weights | None  # of the Ascend layout
    config: dict[str, Any]
    tensors: list[TensorSpec]
    files: dict[str, str]  # key -> file, relative to the directory
    locations: dict[str, Location]

    @property
    def plan(self) -> ModelPlan:
        """Topology of the model."""
        return ModelPlan.from_config(self.config)


def _listed(label: str, items: list[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return f"{label}: {'; '.join(item.encode('unicode_escape').decode() for item in items[:SHOWN])}{more}"


def _weight_map(path: Path) -> dict[str, str]:
    index = _read_json(path)
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{path}: has no weight_map")
    for key, file in files.items():
        if not isinstance(file, str) or not file or Path(file).is_absolute() or ".." in Path(file).parts:
            raise CheckpointError(f"{path}: {key} is said to lie in {file!r}, which is not inside the checkpoint")
    return files


def expected_tensors(config: dict[str, Any], layout: Layout, weights: Weights | None) -> dict[str, Stored]:
    """Key -> stored form of every tensor that a checkpoint with this config has."""
    result: dict[str, Stored] = {}
    for spec in inventory(config):
        stored = spec.official() if layout is Layout.OFFICIAL else spec.ascend(weights or Weights.W8A8)
        result.update((item.key, item) for item in stored)
    if layout is Layout.ASCEND:
        for copy in draft_copies(config):
            source = result[copy.source]
            result[copy.name] = Stored(copy.name, source.dtype, source.shape)
    return result


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Check a directory completely, without reading data. Raises CheckpointError, ConfigError.

    All problems are reported together: missing, unknown and misplaced tensors, wrong dtypes and
    shapes, missing and cut files.
    """
    directory = Path(directory)
    config = read_config(directory)
    layout = identify(directory)
    index = directory / (ASCEND_INDEX if layout is Layout.ASCEND else OFFICIAL_INDEX)
    files = _weight_map(index)
    weights = _ascend_weights(directory, config) if layout is Layout.ASCEND else None
    expected = expected_tensors(config, layout, weights)

    problems = []
    missing = [key for key in expected if key not in files]
    unknown = [key for key in files if key not in expected]
    absent = [file for file in sorted(set(files.values())) if not (directory / file).is_file()]
    if absent:
        problems.append(_listed("files that the index names are missing", absent))
    if missing:
        problems.append(_listed("tensors missing from the index", missing))
    if unknown:
        problems.append(_listed("tensors that this model does not have", unknown))
    locations: dict[str, Location] = {}
    if not problems:
        headers = {file: read_header(directory / file) for file in sorted(set(files.values()))}
        problems += _compare_headers(headers, files, expected)
    if problems:
        raise CheckpointError(f"{index}: " + ".\n  ".join(problems))
    for key, file in files.items():
        stored, offset = headers[file][key]
        locations[key] = Location(file, offset, stored.bytes)
    return Checkpoint(directory, layout, weights, config, inventory(config), files, locations)


Headers = dict[str, dict[str, tuple[Stored, int]]]  # by file and key


def _compare_headers(headers: Headers, files: dict[str, str], expected: dict[str, Stored]) -> list[str]:
    elsewhere, differs = [], []
    for key, file in files.items():
        found, wanted = headers[file].get(key, (None, 0))[0], expected[key]
        if found is None:
            elsewhere.append(f"{key} is not in {file}")
        elif found != wanted:
            differs.append(
                f"{key} in {file} is {found.dtype} {list(found.shape)}, expected {wanted.dtype} {list(wanted.shape)}"
            )
    problems = []
    if elsewhere:
        problems.append(_listed("tensors not in the file that the index names", elsewhere))
    if differs:
        problems.append(_listed("tensors of another form", differs))
    return problems


def _ascend_weights(directory: Path, config: dict[str, Any]) -> Weights:
    """What a conversion's own description says its linears are; checks that it labels every tensor."""
    path = directory / DESCRIPTION
    if not path.is_file():
        raise CheckpointError(
            f"{directory}: {DESCRIPTION} is missing; convert the official weights with dsv41 quantize"
        )
    description = _read_json(path)
    if not isinstance(description, dict):
        raise CheckpointError(f"{path}: expected an object with one label per tensor")
    kinds = {"W8A8_DYNAMIC": Weights.W8A8, "FLOAT": Weights.BF16}
    found = description.get("model_quant_type")
    weights = kinds.get(found) if isinstance(found, str) else None
    if weights is None:
        raise CheckpointError(
            f"{path}: model_quant_type is {description.get('model_quant_type')!r}, expected W8A8_DYNAMIC or FLOAT"
        )
    labels = description_labels(config, weights)
    wrong = [
        f"{key} is labelled {description.get(key)!r}, expected {label!r}"
        for key, label in labels.items()
        if description.get(key) != label
    ]
    if wrong:
        raise CheckpointError(f"{path}: " + _listed("labels", wrong))
    return weights


def description_labels(config: Mapping[str, Any], weights: Weights) -> dict[str, str]:
    """One label per tensor key of the Ascend layout (spec section 5.2)."""
    labels: dict[str, str] = {}
    for spec in inventory(config):
        label = "W8A8_DYNAMIC" if weights is Weights.W8A8 and spec.quantized else "FLOAT"
        labels.update((stored.key, label) for stored in spec.ascend(weights))
    labels.update((copy.name, "FLOAT") for copy in draft_copies(config))
    return labels


__all__ = [
    "ASCEND_INDEX",
    "DESCRIPTION",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "Layout",
    "description_labels",
    "expected_tensors",
    "identify",
    "open_checkpoint",
    "read_config",
    "read_header",
]
