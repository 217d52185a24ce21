"""One step of a conversion: rows are read by slices, converted in blocks that fit the cache, written in place.

Runs in worker processes that have neither torch nor vLLM loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import native
from .checkpoint import CheckpointError, Location
from .inventory import GROUP, Kind, TensorSpec, Weights
from .plan import Output, Piece, Step, matrix_shape
from .rotation import apply

BLOCK_ELEMENTS = 1 << 20
OPEN_FILES = 4  # of the source: steps go through it front to back
AGAIN = "then run the same command again: it continues where it stopped"
Array = NDArray[Any]


def kernels() -> ModuleType:
    """The compiled kernels, or the clear reference where they were not built."""
    if native.available:
        return native
    from . import reference

    return reference


@dataclass
class Source:
    """Slices of the tensors of a checkpoint."""

    directory: Path

    def __post_init__(self) -> None:
        self._descriptors: dict[str, int] = {}
        self._read: dict[str, tuple[int, int]] = {}  # by file: where reading has begun and ended since the last release

    def read(self, location: Location, offset: int, size: int) -> Array:
        """``size`` bytes of a tensor, from byte ``offset`` of its data on. Raises CheckpointError."""
        path = self.directory / location.file
        out = np.empty(size, np.uint8)
        done, begin = 0, location.offset + offset
        try:
            if location.file not in self._descriptors:
                if len(self._descriptors) >= OPEN_FILES:
                    self.release()
                    os.close(self._descriptors.pop(next(iter(self._descriptors))))
                self._descriptors[location.file] = os.open(path, os.O_RDONLY)
            descriptor = self._descriptors[location.file]
            while done < size:
                count = os.preadv(descriptor, [out.data[done:]], begin + done)
                if count == 0:
                    raise CheckpointError(
                        f"{path}: ends before byte {begin + done}, it was cut meanwhile; download it again"
                    )
                done += count
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read at byte {begin + done} ({error.strerror})") from error
        first, last = self._read.get(location.file, (begin, begin))
        self._read[location.file] = min(first, begin), max(last, begin + size)
        return out

    def release(self) -> None:
        """The page cache of a busy host belongs to others: nothing that was read is read again."""
        for file, (first, last) in self._read.items():
            os.posix_fadvise(self._descriptors[file], first, last - first, os.POSIX_FADV_DONTNEED)
        self._read.clear()

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


class Worker:
    """Runs steps of one conversion, in any order."""

    def __init__(self, source: Path, target: Path, weights: Weights) -> None:
        self.source, self.target, self.weights = Source(source), target, weights
        self.kernels: Any = kernels()
        self._file = source  # that is being read, for messages

    def run(self, step: Step, locations: Mapping[str, Location]) -> None:
        """Write all pieces of a step. ``locations``: where each tensor lies that they need. Raises CheckpointError."""
        outputs = {name: os.open(self.target / name, os.O_WRONLY) for name in step.files}
        try:
            for piece in step.pieces:
                self._piece(piece, locations, outputs)
            for descriptor in outputs.values():  # starts writing back; written pages leave the cache
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            self.source.release()
        finally:
            for descriptor in outputs.values():
                os.close(descriptor)

    def _piece(self, piece: Piece, locations: Mapping[str, Location], outputs: Mapping[str, int]) -> None:
        self._file = self.source.directory / locations[piece.spec.name].file
        columns = matrix_shape(piece.spec.shape)[1]
        rows = max(BLOCK_ELEMENTS // columns // GROUP, 1) * GROUP
        norm = None
        if piece.rotation is not None and piece.rotation.norm is not None:
            norm = self._vector(locations[piece.rotation.norm])
        for begin in range(piece.begin, piece.end, rows):
            end = min(begin + rows, piece.end)
            results = self._convert(piece, begin, end, norm, locations)
            for output, result in zip(piece.outputs, results, strict=True):
                self._write(output, outputs[output.file], begin, result)

    def _vector(self, location: Location) -> Array:
        bits = self.source.read(location, 0, location.bytes).view(np.uint16)
        values = np.empty(len(bits), np.float32)
        if self.kernels.float_from_bf16(bits, values) >= 0:
            raise CheckpointError(f"{self.source.directory / location.file}: a norm weight holds NaN or infinity")
        return values

    def _write(self, output: Output, descriptor: int, row: int, values: Array) -> None:
        flat: Any = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        data = memoryview(flat)
        begin, done = output.offset + row * output.row_bytes, 0
        try:
            while done < len(data):
                done += os.pwrite(descriptor, data[done:], begin + done)
        except OSError as error:
            raise CheckpointError(
                f"{self.target / output.file}: cannot be written ({error.strerror}); make room, {AGAIN}"
            ) from error

    def _convert(
        self, piece: Piece, begin: int, end: int, norm: Array | None, locations: Mapping[str, Location]
    ) -> list[Array]:
        """The outputs' rows ``begin`` to ``end``."""
        spec, shape = piece.spec, (end - begin, matrix_shape(piece.spec.shape)[1])
        weight, scale = self._read(spec, begin, end, locations)
        quantized = self.weights is Weights.W8A8 and spec.quantized
        if self.weights is Weights.W8A8 and spec.kind is Kind.TABLE:
            groups = (shape[0], shape[1] // GROUP)
            return self._int8("engram_int8_from_fp8", (weight, scale), shape, groups, piece, begin)
        if quantized and piece.rotation is None:
            kernel = "int8_from_mxfp4" if spec.kind is Kind.EXPERT else "int8_from_fp8_tiles"
            codes, scales = self._int8(kernel, (weight, scale), shape, shape[:1], piece, begin)
            return [codes, scales, np.zeros_like(scales)]
        values = self._values(piece, begin, weight, scale, shape)
        if piece.rotation is not None:
            values = apply(piece.rotation, values, begin, norm, self.kernels)
        if quantized:
            codes, scales = self._int8("int8_from_float", (values,), shape, shape[:1], piece, begin)
            return [codes, scales, np.zeros_like(scales)]
        if spec.kind in (Kind.F32, Kind.WIDENED):
            self._finite(values, piece, begin)
            return [values]
        out = np.empty(shape, np.uint16)
        self._check(self.kernels.bf16_from_float(values, out), piece, begin)
        return [out]

    def _int8(
        self,
        kernel: str,
        arrays: tuple[Array | None, ...],
        shape: tuple[int, int],
        groups: tuple[int, ...],
        piece: Piece,
        begin: int,
    ) -> list[Array]:
        """Codes of this shape, and one scale for each of these groups."""
        codes, scales = np.empty(shape, np.int8), np.empty(groups, np.float32)
        self._check(getattr(self.kernels, kernel)(*arrays, codes, scales), piece, begin)
        return [codes, scales]

    def _read(
        self, spec: TensorSpec, begin: int, end: int, locations: Mapping[str, Location]
    ) -> tuple[Array, Array | None]:
        parts: list[Array | None] = []
        for stored in spec.official():
            rows = matrix_shape(stored.shape)[0]
            first, last = begin, end
            if rows < matrix_shape(spec.shape)[0]:  # scales of tiles
                first, last = begin // GROUP, -(-end // GROUP)
            row_bytes = stored.bytes // rows
            data = self.source.read(locations[stored.key], first * row_bytes, (last - first) * row_bytes)
            parts.append(data.reshape(last - first, row_bytes))
        weight = parts[0]
        assert weight is not None
        return weight, parts[1] if len(parts) > 1 else None

    def _values(self, piece: Piece, begin: int, weight: Array, scale: Array | None, shape: tuple[int, int]) -> Array:
        """Dequantised float32."""
        values, kind = np.empty(shape, np.float32), piece.spec.kind
        if kind is Kind.EXPERT:
            bad = self.kernels.float_from_mxfp4(weight, scale, values)
        elif kind in (Kind.LINEAR, Kind.FLOAT_LINEAR):
            bad = self.kernels.float_from_fp8(weight, scale, GROUP, values)
        elif kind is Kind.TABLE:
            bad = self.kernels.float_from_fp8(weight, scale, 1, values)
        elif kind is Kind.F32:
            values = weight.view(np.float32)
            bad = self._finite(values, piece, begin)
        else:
            bad = self.kernels.float_from_bf16(weight.view(np.uint16), values)
        self._check(bad, piece, begin)
        return values

    def _finite(self, values: Array, piece: Piece, begin: int) -> int:
        wrong = ~np.isfinite(values)
        bad = int(wrong.ravel().argmax()) if wrong.any() else -1
        self._check(bad, piece, begin)
        return bad

    def _check(self, place: int, piece: Piece, begin: int) -> None:
        if place < 0:
            return
        spec = piece.spec
        row, column = divmod(place, matrix_shape(spec.shape)[1])
        raise CheckpointError(
            f"{self._file}: {spec.name} holds NaN or infinity in row {begin + row}, at or behind column "
            f"{column} (a damaged weight, or a scale of code 255); download its file again"
        )
