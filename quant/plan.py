"""What a conversion will write, down to the byte, from the config alone: files, tensors, and steps of work.

Every output byte has its place before any data is read. So steps may run in any order, in any process, and again
after a crash, and the files come out the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .inventory import GROUP, Kind, Stored, TensorSpec, Weights, draft_copies, inventory
from .rotation import Rotation, rotation_of
from .safetensors_writer import header

DEFAULT_SHARD_BYTES = 4 << 30
STEP_BYTES = 64 << 20  # of output: what one worker does between two entries of the journal


@dataclass(frozen=True)
class Output:
    """One tensor in a file: where its data begins, and how many bytes a row of it has."""

    file: str
    offset: int
    stored: Stored

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of ``matrix_shape``."""
        return self.stored.bytes // matrix_shape(self.stored.shape)[0]


@dataclass(frozen=True)
class Piece:
    """Rows ``begin`` to ``end`` of a tensor of the model, and the tensors that they become."""

    spec: TensorSpec
    begin: int
    end: int
    outputs: tuple[Output, ...]
    rotation: Rotation | None

    @property
    def bytes(self) -> int:
        """Of output."""
        return sum(output.row_bytes for output in self.outputs) * (self.end - self.begin)


@dataclass(frozen=True)
class Step:
    """Pieces of one file, or of an Engram table's files, done by one worker in one go."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        """Of output."""
        return sum(piece.bytes for piece in self.pieces)

    @property
    def files(self) -> set[str]:
        """Names of the files that it writes to."""
        return {output.file for piece in self.pieces for output in piece.outputs}


@dataclass
class OutputFile:
    """One output file: its tensors, in order."""

    name: str
    tensors: list[Stored] = field(default_factory=list)
    size: int = 0  # bytes of data

    def header(self) -> tuple[bytes, list[int], int]:
        """As ``safetensors_writer.header``."""
        return header(self.tensors)


@dataclass(frozen=True)
class Plan:
    """Everything that a conversion writes but the small files."""

    files: list[OutputFile]
    steps: list[Step]

    @property
    def bytes(self) -> int:
        """Of tensor data."""
        return sum(file.size for file in self.files)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) as which a tensor is cut: a vector is one row."""
    return (1, shape[0]) if len(shape) == 1 else (shape[0], math.prod(shape[1:]))


def make_plan(
    config: Mapping[str, Any],
    weights: Weights,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    rotate: bool = False,
    step_bytes: int = STEP_BYTES,
) -> Plan:
    """The plan for a checkpoint with this config. Shards have at most ``shard_bytes`` (at least one tensor); the Engram
    tables have files of their own beside them, where every reader of safetensors folders finds them."""
    specs = inventory(config)
    rotations = {spec.name: rotation_of(spec, config) if rotate else None for spec in specs}
    shards = [(OutputFile(""), list[tuple[TensorSpec, int, Rotation | None]]())]  # with tensors: how many it becomes
    for spec, stored, rotation in _weights(specs, config, weights, rotations):
        size = sum(item.bytes for item in stored)
        if shards[-1][0].tensors and shards[-1][0].size + size > shard_bytes:
            shards.append((OutputFile(""), []))
        file, sources = shards[-1]
        file.tensors += stored
        file.size += size
        sources.append((spec, len(stored), rotation))
    files, pieces = [], []
    for number, (file, sources) in enumerate(shards, 1):
        file.name = f"quant_model_weights-{number:05d}-of-{len(shards):05d}.safetensors"
        files.append(file)
        outputs = iter(_outputs(file))
        pieces.append(
            [
                piece
                for spec, count, rotation in sources
                for piece in _pieces(spec, tuple(next(outputs) for _ in range(count)), rotation, step_bytes)
            ]
        )
    for spec in specs:
        if spec.kind is Kind.TABLE:
            own = [OutputFile(_table_file(spec, item), [item], item.bytes) for item in spec.ascend(weights)]
            files += own
            pieces.append(list(_pieces(spec, tuple(_outputs(file)[0] for file in own), None, step_bytes)))
    return Plan(files, list(_steps(pieces, step_bytes)))


def _weights(
    specs: list[TensorSpec], config: Mapping[str, Any], weights: Weights, rotations: dict[str, Rotation | None]
) -> Iterator[tuple[TensorSpec, tuple[Stored, ...], Rotation | None]]:
    """All but the Engram tables; the draft's copies come last and are never rotated."""
    by_name = {spec.name: spec for spec in specs}
    for spec in specs:
        if spec.kind is not Kind.TABLE:
            yield spec, spec.ascend(weights), rotations[spec.name]
    for copy in draft_copies(config):
        source = by_name[copy.source]
        stored = source.ascend(weights)[0]
        yield source, (Stored(copy.name, stored.dtype, stored.shape),), None


def _table_file(spec: TensorSpec, stored: Stored) -> str:
    return f"{spec.base.replace('.', '_')}.{stored.key.rpartition('.')[2]}.safetensors"


def _outputs(file: OutputFile) -> list[Output]:
    _, offsets, _ = file.header()
    return [Output(file.name, offset, stored) for offset, stored in zip(offsets, file.tensors, strict=True)]


def _pieces(
    spec: TensorSpec, outputs: tuple[Output, ...], rotation: Rotation | None, step_bytes: int
) -> Iterator[Piece]:
    rows = matrix_shape(spec.shape)[0]
    row_bytes = sum(output.row_bytes for output in outputs)
    # whole tiles and blocks of the rotation
    most = max(step_bytes // row_bytes // GROUP, 1) * GROUP
    for begin in range(0, rows, most):
        yield Piece(spec, begin, min(begin + most, rows), outputs, rotation)


def _steps(files: list[list[Piece]], step_bytes: int) -> Iterator[Step]:
    number = 0
    for pieces in files:
        taken: list[Piece] = []
        for piece in pieces:
            if taken and sum(other.bytes for other in taken) + piece.bytes > step_bytes:
                yield Step(number, tuple(taken))
                number += 1
                taken = []
            taken.append(piece)
        yield Step(number, tuple(taken))
        number += 1
