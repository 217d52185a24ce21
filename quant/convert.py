"""From the official checkpoint to the Ascend layout, tensor by tensor."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from ..ops.mx import decode_fp4, decode_fp8_rows, decode_fp8_tiles
from ..ops.w8a8 import quantize_channels, quantize_engram_rows
from .checkpoint import (
    ASCEND_INDEX,
    DESCRIPTION,
    Checkpoint,
    CheckpointError,
    Layout,
    description_labels,
    open_checkpoint,
)
from .inventory import Kind, Stored, TensorSpec, Weights, draft_copies
from .partial import partial_directory
from .safetensors_writer import SafetensorsWriter

TABLE_ROWS = 65536  # rows of an Engram table in memory at a time
DEFAULT_SHARD_BYTES = 4 << 30
ROTATION = "optional/quarot.safetensors"
ENGRAM_ROTATION = {  # what a loader written for ModelSlim's rotated checkpoints must find; ours is the identity
    "value_projection_rotated": True,
    "value_basis": "quarot_global",
    "key_and_gate_basis": "original",
    "runtime_delta_rotation": False,
}


@dataclass
class _File:
    """One output file: its tensors and where each comes from."""

    name: str
    tensors: list[Stored] = field(default_factory=list)
    sources: list[TensorSpec] = field(default_factory=list)
    bytes: int = 0

    def add(self, source: TensorSpec, tensors: tuple[Stored, ...]) -> None:
        """One more tensor of the model."""
        self.sources.append(source)
        self.tensors += tensors
        self.bytes += sum(stored.bytes for stored in tensors)


def _weight_files(checkpoint: Checkpoint, weights: Weights, shard_bytes: int) -> list[_File]:
    """Everything but the Engram tables, in shards of at most ``shard_bytes`` (at least one tensor)."""
    by_name = {spec.name: spec for spec in checkpoint.tensors}
    wanted = [(spec, spec.ascend(weights)) for spec in checkpoint.tensors if spec.kind is not Kind.TABLE]
    for copy in draft_copies(checkpoint.config):
        source = by_name[copy.source]
        stored = source.ascend(weights)[0]
        wanted.append((source, (Stored(copy.name, stored.dtype, stored.shape),)))
    shards = [_File("")]
    for spec, stored_as in wanted:
        size = sum(stored.bytes for stored in stored_as)
        if shards[-1].tensors and shards[-1].bytes + size > shard_bytes:
            shards.append(_File(""))
        shards[-1].add(spec, stored_as)
    for number, shard in enumerate(shards, 1):
        shard.name = f"quant_model_weights-{number:05d}-of-{len(shards):05d}.safetensors"
    return shards


def _table_files(checkpoint: Checkpoint, weights: Weights) -> list[list[_File]]:
    """For each Engram table one file per tensor (spec section 5.4)."""
    folder = "engram_int8" if weights is Weights.W8A8 else "engram_bf16"
    tables = []
    for spec in checkpoint.tensors:
        if spec.kind is Kind.TABLE:
            base = spec.base.replace(".", "_")
            files = []
            for stored in spec.ascend(weights):
                file = _File(f"{folder}/{base}.{stored.key.rpartition('.')[2]}.safetensors")
                file.add(spec, (stored,))
                files.append(file)
            tables.append(files)
    return tables


class _Source:
    """Dequantised tensors of the official checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._open: tuple[str, Any] = ("", None)

    def _handle(self, key: str) -> Any:
        file = self.checkpoint.files[key]
        if self._open[0] != file:
            try:
                self._open = (file, safe_open(self.checkpoint.directory / file, framework="pt"))
            except SafetensorError as error:
                raise CheckpointError(f"{self.checkpoint.directory / file}: {error}; download it again") from error
        return self._open[1]

    def raw(self, key: str) -> Tensor:
        tensor: Tensor = self._handle(key).get_tensor(key)
        return tensor

    def rows(self, spec: TensorSpec, begin: int, end: int) -> Tensor:
        """Rows of an Engram table, float32."""
        weight = self._handle(spec.name).get_slice(spec.name)[begin:end]
        scale = self._handle(f"{spec.base}.scale").get_slice(f"{spec.base}.scale")[begin:end]
        return self._finite(decode_fp8_rows(weight, scale), spec)

    def dense(self, spec: TensorSpec) -> Tensor:
        """A whole tensor, float32."""
        weight = self.raw(spec.name)
        if spec.kind is Kind.EXPERT:
            weight = decode_fp4(weight, self.raw(f"{spec.base}.scale"))
        elif spec.kind in (Kind.LINEAR, Kind.FLOAT_LINEAR):
            weight = decode_fp8_tiles(weight, self.raw(f"{spec.base}.scale"))
        return self._finite(weight.float(), spec)

    def _finite(self, values: Tensor, spec: TensorSpec) -> Tensor:
        if not all(torch.isfinite(extreme) for extreme in values.aminmax()):
            raise CheckpointError(
                f"{self.checkpoint.directory / self.checkpoint.files[spec.name]}: {spec.name} holds NaN or infinity "
                "(a damaged weight, or a scale of code 255); download the file again"
            )
        return values


def _converted(spec: TensorSpec, values: Tensor, weights: Weights) -> Iterator[Tensor]:
    """The tensors of ``spec.ascend(weights)``, in that order."""
    if spec.kind in (Kind.F32, Kind.WIDENED):
        yield values
    elif weights is Weights.W8A8 and spec.quantized:
        codes, scale = quantize_channels(values)
        yield from (codes, scale, torch.zeros_like(scale))
    else:
        yield values.to(torch.bfloat16)


def _write_table(files: list[_File], weights: Weights, source: _Source, directory: Path, tick: Tick) -> None:
    """One table, read once: codes and scales go to their files side by side."""
    spec = files[0].sources[0]
    with ExitStack() as stack:
        writers = [stack.enter_context(SafetensorsWriter(_made(directory / file.name), file.tensors)) for file in files]
        for begin in range(0, spec.shape[0], TABLE_ROWS):
            rows = source.rows(spec, begin, min(begin + TABLE_ROWS, spec.shape[0]))
            parts = (rows.to(torch.bfloat16),) if weights is Weights.BF16 else quantize_engram_rows(rows)
            for file, writer, part in zip(files, writers, parts, strict=True):
                writer.append(file.tensors[0].key, part)
                tick(part.numel() * part.element_size())


def _made(path: Path) -> Path:
    """The path, its directory made."""
    path.parent.mkdir(exist_ok=True)
    return path


def _write_weights(file: _File, weights: Weights, source: _Source, directory: Path, tick: Tick) -> None:
    remaining = iter(file.tensors)
    with SafetensorsWriter(directory / file.name, file.tensors) as writer:
        for spec in file.sources:
            for tensor in _converted(spec, source.dense(spec), weights):
                writer.append(next(remaining).key, tensor)
                tick(tensor.numel() * tensor.element_size())


Tick = Callable[[int], None]


def convert(source: str | Path, target: str | Path, weights: Weights, shard_bytes: int = DEFAULT_SHARD_BYTES) -> Path:
    """Convert an official checkpoint. Returns the new directory.

    Everything is written to a hidden directory beside the target and renamed at the end; a failure removes
    it. Raises CheckpointError: before data is read for a bad source, an existing target, too little
    room, an unreadable side file or a second conversion to the same target; later for damaged data.
    """
    target = Path(target)
    _refuse_existing(target)
    checkpoint = open_checkpoint(source)
    if checkpoint.layout is not Layout.OFFICIAL:
        raise CheckpointError(f"{checkpoint.directory}: is already in the Ascend layout; give the official checkpoint")
    files, tables = _weight_files(checkpoint, weights, shard_bytes), _table_files(checkpoint, weights)
    total = sum(file.bytes for file in [*files, *(file for table in tables for file in table)])
    parent = target.absolute().parent
    if not parent.is_dir():
        raise CheckpointError(f"{parent}: no such directory; create it first")
    free = shutil.disk_usage(parent).free
    if free < total:
        raise CheckpointError(f"{parent}: {free >> 20} MiB free, the conversion needs {total >> 20} MiB")
    side_files = _side_files(checkpoint.directory)
    with partial_directory(target) as partial:
        bar = tqdm(total=total, unit="B", unit_scale=True, desc="quantize", disable=not sys.stderr.isatty())
        reader = _Source(checkpoint)
        with bar:
            for file in files:
                _write_weights(file, weights, reader, partial, bar.update)
            for table in tables:
                _write_table(table, weights, reader, partial, bar.update)
        for path in side_files:
            shutil.copyfile(path, partial / path.name)
        written = [*files, *(file for table in tables for file in table)]
        _write_descriptions(checkpoint, written, weights, partial, total)
        open_checkpoint(partial)
    return target


def _refuse_existing(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target}: exists already; remove it or name another directory")


def _side_files(directory: Path) -> list[Path]:
    """Tokenizer and other small files that belong to the checkpoint and are not rewritten."""
    own = {"config.json", DESCRIPTION}
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
    return found


def _write_descriptions(
    checkpoint: Checkpoint, files: list[_File], weights: Weights, partial: Path, total: int
) -> None:
    hidden = checkpoint.config["text_config"]["hidden_size"]
    identity = partial / ROTATION
    identity.parent.mkdir()
    with SafetensorsWriter(identity, [Stored("global_rotation", "F32", (hidden, hidden))]) as writer:
        writer.append("global_rotation", torch.eye(hidden, dtype=torch.float32))
    kind = "W8A8_DYNAMIC" if weights is Weights.W8A8 else "FLOAT"
    description = {
        "version": "1.0.0",
        "model_quant_type": kind,
        "group_size": 0,
        "metadata": {},
        "optional": {"quarot": {"rotation_map": {"global_rotation": ROTATION}}},
        **description_labels(checkpoint.config, weights),
    }
    _write_json(partial / DESCRIPTION, description)
    weight_map = {stored.key: file.name for file in files for stored in file.tensors}
    _write_json(partial / ASCEND_INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    config = dict(checkpoint.config)
    config["quantization_config"] = {"quant_method": "ascend", "model_quant_type": kind}
    config["engram_rotation_config"] = ENGRAM_ROTATION
    _write_json(partial / "config.json", config)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
