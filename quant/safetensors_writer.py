"""Headers of safetensors files whose data are written in pieces: the library's own writer needs all tensors in memory.

Format: https://huggingface.co/docs/safetensors (8-byte header length, JSON header, data).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

from .inventory import Stored


def header(tensors: Sequence[Stored]) -> tuple[bytes, list[int], int]:
    """The first bytes of a file that holds ``tensors`` in this order, where each begins, and the file's size."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin, begins = 0, []
    for stored in tensors:
        end = begin + stored.bytes
        entries[stored.key] = {"dtype": stored.dtype, "shape": stored.shape, "data_offsets": [begin, end]}
        begins.append(begin)
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # readers want the data aligned
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, [start + offset for offset in begins], start + begin
