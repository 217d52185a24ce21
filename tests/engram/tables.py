"""Small Engram tables in real safetensors files, and what look-ups in them must give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_ascend_dsv41.ops import engram_lookup
from vllm_ascend_dsv41.quant import Checkpoint, Layout, Weights
from vllm_ascend_dsv41.quant.checkpoint import Location, read_header

DIM = 64


def primes(rows: int, columns: int = 24) -> Tensor:
    """Bucket counts that sum up to ``rows``, all different."""
    sizes = torch.arange(columns) + rows // columns - columns // 2
    sizes[-1] += rows - int(sizes.sum())
    return sizes


def write_tables(directory: Path, rows: dict[int, int], weights: Weights = Weights.W8A8, seed: int = 0) -> Checkpoint:
    """A checkpoint of nothing but tables. ``rows``: of each layer."""
    random = np.random.default_rng(seed)
    directory.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    locations: dict[str, Location] = {}
    for layer, count in rows.items():
        codes = torch.from_numpy(random.integers(-127, 128, (count, DIM), dtype=np.int8))
        scale = torch.from_numpy(np.exp2(random.integers(-9, 3, (count, DIM // 32))).astype(np.float32))
        parts = {"weight": codes, "scale": scale} if weights is Weights.W8A8 else {"weight": codes.bfloat16()}
        for part, tensor in parts.items():
            key, file = f"layers.{layer}.engram.embed.{part}", f"layers_{layer}_engram_embed.{part}.safetensors"
            save_file({key: tensor}, directory / file)
            stored, offset = read_header(directory / file)[key]
            files[key], locations[key] = file, Location(file, offset, stored.bytes)
    return Checkpoint(directory, Layout.ASCEND, weights, {}, [], files, locations)


def expected(checkpoint: Checkpoint, layer: int, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the whole table, from the file, by the operator's reference."""
    parts = {}
    for part, kind in (("weight", "<i1"), ("scale", "<f4")):
        place = checkpoint.locations.get(f"layers.{layer}.engram.embed.{part}")
        if place is not None:
            data = (checkpoint.directory / place.file).read_bytes()[place.offset :]
            parts[part] = torch.from_numpy(np.frombuffer(data, dtype=kind).copy())
    if "scale" in parts:
        codes = parts["weight"].view(-1, DIM)
        scale: Tensor | None = parts["scale"].view(len(codes), -1)
    else:
        codes, scale = parts["weight"].view(torch.bfloat16).view(-1, DIM), None
    return engram_lookup.implementations["reference"](codes, scale, rows, dtype)
