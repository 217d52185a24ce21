"""A safetensors file written front to back: the library's own writer needs all tensors in memory."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from .inventory import Stored

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I8": torch.int8}


class SafetensorsWriter:
    """Writes ``tensors`` in their order; each may come in several pieces along its first dimension.

    Format: https://huggingface.co/docs/safetensors (8-byte header length, JSON header, data).
    """

    def __init__(self, path: Path, tensors: list[Stored]) -> None:
        self._remaining: list[tuple[Stored, int]] = []
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for stored in tensors:
            size = stored.bytes
            header[stored.key] = {"dtype": stored.dtype, "shape": stored.shape, "data_offsets": [offset, offset + size]}
            self._remaining.append((stored, size))
            offset += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # readers want the data aligned
        self._path = path
        self._file = path.open("xb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def append(self, key: str, piece: Tensor) -> None:
        """The next piece of the tensor whose turn it is."""
        stored, left = self._remaining[0]
        data = piece.contiguous()
        size = data.numel() * data.element_size()
        if key != stored.key or data.dtype != DTYPES[stored.dtype] or size > left:
            raise ValueError(f"{self._path}: {key} {data.dtype} with {size} bytes, expected {left} bytes of {stored}")
        self._file.write(data.view(torch.uint8).flatten().numpy().data)
        self._remaining[0] = (stored, left - size)
        if left == size:
            del self._remaining[0]

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None and self._remaining:
            raise ValueError(f"{self._path}: {self._remaining[0][0].key} is incomplete")
