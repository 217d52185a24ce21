"""Reading the official checkpoint and the Ascend conversion, tensor by tensor, dequantised.

Layouts: spec section 2 (official: MXFP4 experts, FP8 32x32 tiles, Engram FP8 with 1x32 scales) and
section 5 (Ascend: INT8 with one float32 scale per output row, Engram INT8 with 1x32 float32 scales).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from .numerics import decode_e2m1, decode_e8m0, spread

INDEX_FILES = ("model.safetensors.index.json", "quant_model_weights.safetensors.index.json")


class CheckpointError(Exception):
    """The directory does not hold what the model needs; the message says what and where."""


@dataclass
class Linear:
    """A dequantised matrix and what it was stored as.

    ``weight``: [out, in] float32. ``stored``: ``mx`` (FP8 or FP4 with E8M0 scales), ``int8`` or
    ``float``. ``codes``, ``scale``: the INT8 codes as float64 and their scale [out, 1], so that the
    integer product can be formed exactly.
    """

    weight: Tensor
    stored: str
    codes: Tensor | None = None
    scale: Tensor | None = None


class Checkpoint:
    """One checkpoint directory, read lazily."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        index = next((self.directory / name for name in INDEX_FILES if (self.directory / name).is_file()), None)
        if index is None:
            raise CheckpointError(f"{self.directory}: none of {', '.join(INDEX_FILES)} is there")
        self.files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        self._open: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def _handle(self, name: str) -> Any:
        if name not in self.files:
            raise CheckpointError(f"{self.directory}: the index has no tensor {name}")
        file = self.files[name]
        if file not in self._open:
            self._open[file] = safe_open(self.directory / file, framework="pt")
        return self._open[file]

    def raw(self, name: str) -> Tensor:
        """The tensor as stored."""
        tensor: Tensor = self._handle(name).get_tensor(name)
        return tensor

    def vector(self, name: str) -> Tensor:
        """A tensor stored without scales, as float32."""
        return self.raw(name).float()

    def linear(self, prefix: str) -> Linear:
        """The matrix ``prefix.weight``, whatever format it has."""
        weight = self.raw(f"{prefix}.weight")
        rows, columns = int(weight.shape[0]), int(weight.shape[1])
        if weight.dtype == torch.float8_e4m3fn:
            scale = decode_e8m0(self.raw(f"{prefix}.scale"))
            return Linear(weight.float() * spread(scale, (rows, columns), (32, 32)), "mx")
        if weight.dtype == torch.int8 and f"{prefix}.scale" in self:
            scale = decode_e8m0(self.raw(f"{prefix}.scale"))
            return Linear(decode_e2m1(weight) * scale.repeat_interleave(32, 1), "mx")
        if weight.dtype == torch.int8:
            scale = self.raw(f"{prefix}.weight_scale")
            return Linear(weight.float() * scale, "int8", weight.double(), scale)
        return Linear(weight.float(), "float")

    def rotation(self) -> Tensor | None:
        """R [D, D] of a rotated conversion (section 5.6): its streams are x R. None for the official layout."""
        path = self.directory / "optional" / "quarot.safetensors"
        if not path.is_file():
            return None
        with safe_open(path, framework="pt") as file:
            matrix: Tensor = file.get_tensor("global_rotation")
        return matrix

    def table_rows(self, prefix: str, ids: Tensor) -> Tensor:
        """Rows ``ids`` [n] of an Engram table -> [n, dim] float32. Reads only what the ids span."""
        name = f"{prefix}.weight"
        unique, inverse = ids.unique(return_inverse=True)

        def gather(key: str) -> Tensor:
            view = self._handle(key).get_slice(key)
            if int(view.get_shape()[0]) <= 65536:
                whole: Tensor = view[:]
                return whole[unique]
            return torch.cat([view[int(i) : int(i) + 1] for i in unique])

        rows = gather(name)
        if f"{prefix}.scale" in self:
            scale = gather(f"{prefix}.scale")
            scale = decode_e8m0(scale) if scale.dtype == torch.float8_e8m0fnu else scale
            rows = rows.float() * scale.repeat_interleave(rows.shape[1] // scale.shape[1], 1)
        return rows.float()[inverse]
