"""From the official checkpoint to the Ascend layout, tensor by tensor."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from ..ops.mx import decode_fp4, decode_fp8_rows, decode_fp8_tiles
from ..ops.w8a8 import quantize_channels, quantize_engram_rows
from .checkpoint import (
    ASCEND_INDEX,
    DESCRIPTION,
    DTYPE_BYTES,
    Checkpoint,
    CheckpointError,
    Layout,
    description_labels,
    open_checkpoint,
)
from .inventory import Kind, Stored, TensorSpec, Weights, draft_copies
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

    @property
    def bytes(self) -> int:
        return sum(stored_bytes(stored) for stored in self.tensors)


def stored_bytes(stored: Stored) -> int:
    """Size of a tensor's data."""
    count = DTYPE_BYTES[stored.dtype]
    for extent in stored.shape:
        count *= extent
    return count


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
        size = sum(stored_bytes(stored) for stored in stored_as)
        if shards[-1].tensors and shards[-1].bytes + size > shard_bytes:
            shards.append(_File(""))
        shards[-1].tensors += stored_as
        shards[-1].sources.append(spec)
    for number, shard in enumerate(shards, 1):
        shard.name = f"quant_model_weights-{number:05d}-of-{len(shards):05d}.safetensors"
    return shards


def _table_files(checkpoint: Checkpoint, weights: Weights) -> list[_File]:
    """One file per tensor of an Engram table (spec section 5.4)."""
    folder = "engram_int8" if weights is Weights.W8A8 else "engram_bf16"
    files = []
    for spec in checkpoint.tensors:
        if spec.kind is Kind.TABLE:
            base = spec.base.replace(".", "_")
            for stored in spec.ascend(weights):
                suffix = stored.key.rpartition(".")[2]
                files.append(_File(f"{folder}/{base}.{suffix}.safetensors", [stored], [spec]))
    return files


class _Source:
    """Dequantised tensors of the official checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._open: tuple[str, Any] = ("", None)

    def _handle(self, key: str) -> Any:
        file = self.checkpoint.files[key]
        if self._open[0] != file:
            self._open = (file, safe_open(self.checkpoint.directory / file, framework="pt"))
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
        if not torch.isfinite(values).all():
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


def _write_table(file: _File, weights: Weights, source: _Source, writer: SafetensorsWriter, tick: Tick) -> None:
    spec, stored = file.sources[0], file.tensors[0]
    for begin in range(0, spec.shape[0], TABLE_ROWS):
        rows = source.rows(spec, begin, min(begin + TABLE_ROWS, spec.shape[0]))
        if weights is Weights.BF16:
            part = rows.to(torch.bfloat16)
        else:
            codes, scale = quantize_engram_rows(rows)
            part = scale if stored.key.endswith(".scale") else codes
        writer.append(stored.key, part)
        tick(part.numel() * part.element_size())


def _write_weights(file: _File, weights: Weights, source: _Source, writer: SafetensorsWriter, tick: Tick) -> None:
    remaining = iter(file.tensors)
    for spec in file.sources:
        values = source.dense(spec)
        for tensor in _converted(spec, values, weights):
            stored = next(remaining)
            writer.append(stored.key, tensor)
            tick(tensor.numel() * tensor.element_size())
        # a copy has fewer tensors than its source only if the source is quantised, which embed and head are not


Tick = Callable[[int], None]


def convert(source: str | Path, target: str | Path, weights: Weights, shard_bytes: int = DEFAULT_SHARD_BYTES) -> Path:
    """Convert an official checkpoint. Returns the new directory.

    Everything is written to ``<target>.partial`` and renamed at the end; a failure removes it.
    Raises CheckpointError for a bad source, an existing target, a full disk or a second conversion
    to the same target, all before data is read.
    """
    target = Path(target)
    if target.exists():
        raise CheckpointError(f"{target}: exists already; remove it or name another directory")
    checkpoint = open_checkpoint(source)
    if checkpoint.layout is not Layout.OFFICIAL:
        raise CheckpointError(f"{checkpoint.directory}: is already in the Ascend layout; give the official checkpoint")
    files = _weight_files(checkpoint, weights, shard_bytes) + _table_files(checkpoint, weights)
    total = sum(file.bytes for file in files)
    parent = target.absolute().parent
    if not parent.is_dir():
        raise CheckpointError(f"{parent}: no such directory; create it first")
    free = shutil.disk_usage(parent).free
    if free < total:
        raise CheckpointError(f"{parent}: {free / 2**30:.1f} GiB free, the conversion needs {total / 2**30:.1f} GiB")
    with _partial_directory(target) as partial:
        _write_all(checkpoint, files, weights, partial, total)
        _write_descriptions(checkpoint, files, weights, partial, total)
    return target


def _write_all(checkpoint: Checkpoint, files: list[_File], weights: Weights, partial: Path, total: int) -> None:
    source = _Source(checkpoint)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="quantize", disable=not sys.stderr.isatty())
    with bar:
        for file in files:
            path = partial / file.name
            path.parent.mkdir(exist_ok=True)
            with SafetensorsWriter(path, file.tensors) as writer:
                write = _write_table if file.sources[0].kind is Kind.TABLE else _write_weights
                write(file, weights, source, writer, bar.update)


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
    for path in sorted(checkpoint.directory.iterdir()):
        own = path.suffix == ".safetensors" or path.name.endswith(".index.json") or path.name == "config.json"
        if path.is_file() and not own:
            shutil.copyfile(path, partial / path.name)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _partial_directory(target: Path) -> Iterator[Path]:
    """A directory that becomes ``target`` when the block ends well and disappears when it does not.

    What a killed conversion left behind is cleared; a lock tells it from one that is running.
    """
    partial = target.with_name(target.name + ".partial")
    lock_path = target.with_name(target.name + ".lock")
    descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(f"{target}: another conversion is writing it; wait or name another target") from error
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            lock_path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
