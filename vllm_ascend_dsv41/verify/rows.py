"""Rows of a checkpoint's tensors, decoded by the reference's codecs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from ..quant import Checkpoint, Kind, TensorSpec
from ..quant.checkpoint import expected_tensors
from ..quant.inventory import GROUP
from ..quant.plan import matrix_shape
from ..quant.work import Source
from ..reference.numerics import decode_e2m1, decode_e8m0, spread

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
BLOCK_ROWS = 32  # whole tiles of scales
FULL_BLOCK = 1 << 22  # elements at a time when everything is compared


class Reader:
    """Rows of tensors, by key.

    Read, not mapped: safetensors maps a file writable for PyTorch, which Linux refuses for an Engram table (98 GB) on a
    host with less memory than that.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._source = Source(checkpoint.directory)
        self._locations = checkpoint.locations
        stored = expected_tensors(checkpoint.config, checkpoint.layout, checkpoint.weights)
        self.forms = {key: (DTYPES[item.dtype], matrix_shape(item.shape)) for key, item in stored.items()}

    def rows(self, key: str, begin: int, end: int) -> Tensor:
        """Rows as stored, fewer where the tensor ends; a vector is one row."""
        dtype, (rows, columns) = self.forms[key]
        end, row_bytes = min(end, rows), self._locations[key].bytes // rows
        data = self._source.read(self._locations[key], begin * row_bytes, (end - begin) * row_bytes)
        return torch.from_numpy(data).view(dtype).view(end - begin, columns)

    def release(self) -> None:
        """Let what was read leave the page cache."""
        self._source.release()

    def source(self, spec: TensorSpec, begin: int, end: int) -> Tensor:
        """Dequantised rows of the official layout, float32."""
        weight, scale = self.rows(spec.name, begin, end), f"{spec.base}.scale"
        if spec.kind is Kind.EXPERT:
            return decode_e2m1(weight) * decode_e8m0(self.rows(scale, begin, end)).repeat_interleave(GROUP, 1)
        if spec.kind is Kind.TABLE:
            return weight.float() * decode_e8m0(self.rows(scale, begin, end)).repeat_interleave(GROUP, 1)
        if spec.kind in (Kind.LINEAR, Kind.FLOAT_LINEAR):
            factors = decode_e8m0(self.rows(scale, begin // GROUP, -(-end // GROUP)))
            return weight.float() * spread(factors, (len(weight), weight.shape[1]), (GROUP, GROUP))
        return weight.float()


def blocks(rows: int, columns: int, sample: int | None, seed: str) -> Iterator[tuple[int, int]]:
    """Row ranges to look at: all of them, or ``sample`` blocks of 32 rows, the first, the last and random others."""
    if sample is None:
        step = max(FULL_BLOCK // columns // BLOCK_ROWS, 1) * BLOCK_ROWS
        yield from ((begin, min(begin + step, rows)) for begin in range(0, rows, step))
        return
    count = -(-rows // BLOCK_ROWS)
    chosen = {0, count - 1} if sample > 1 else set()
    others = random.Random(seed)  # the same blocks in every run
    while len(chosen) < min(sample, count):
        chosen.add(others.randrange(count))
    yield from ((block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, rows)) for block in sorted(chosen))
