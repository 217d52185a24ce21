"""Streaming a table from safetensors straight into its place."""

from __future__ import annotations

from safetensors import safe_open
from torch import Tensor

from ..quant import Checkpoint
from .storage import HostTable

CHUNK_ROWS = 1 << 18  # 64 MiB of INT8 codes at a time


def load_table(checkpoint: Checkpoint, prefix: str, table: HostTable) -> set[str]:
    """Fill ``table`` from ``<prefix>.weight`` and ``<prefix>.scale``. Returns the keys that were read."""
    targets: dict[str, Tensor] = {f"{prefix}.weight": table.codes}
    if table.scale is not None:
        targets[f"{prefix}.scale"] = table.scale
    first, rows = table.shard.first_row, table.shard.rows
    for key, target in targets.items():
        with safe_open(checkpoint.directory / checkpoint.files[key], framework="pt") as file:
            view = file.get_slice(key)
            for begin in range(0, rows, CHUNK_ROWS):
                end = min(begin + CHUNK_ROWS, rows)
                target[begin:end] = view[first + begin : first + end]
    return set(targets)
