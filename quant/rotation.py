"""QuaRot: the streams turned by an orthogonal matrix, which spreads outliers and changes nothing else.

One matrix R, block-diagonal with equal blocks of 32, acts on the hidden dimension. With rows as vectors a stream x
becomes x R. Everything that reads a stream is multiplied by R from the right, everything that writes one by R
transposed from the left; norm weights are folded into the readers first, because only a plain RMSNorm commutes with R.
Draft blocks keep the original basis: the projection that feeds them undoes R, and they have copies of embedding and
head of their own. Engram gates compare streams with unrotated keys, so a reader must undo R there.
Source: spec sections 5.1 and 5.6; QuaRot, arXiv 2404.00456, section 4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..layer_plan import ConfigError
from .checkpoint import CheckpointError, read_header
from .inventory import Stored, TensorSpec

BLOCK = 32
FILE = "optional/quarot.safetensors"
KEY = "global_rotation"
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Rotation:
    """How one tensor changes.

    ``columns``: multiply by R from the right; ``rows_from``: multiply by R transposed from the left, from this row on;
    ``norm``: name of the norm weight folded into the columns; ``ones``: it is such a weight, and becomes all ones.
    """

    columns: bool = False
    rows_from: int | None = None
    norm: str | None = None
    ones: bool = False


def block() -> Floats:
    """The 32 x 32 block: the Hadamard matrix of order 32 (Sylvester's), orthonormal and symmetric."""
    matrix = np.ones((1, 1), dtype=np.float32)
    while len(matrix) < BLOCK:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]).astype(np.float32)
    return matrix / np.float32(np.sqrt(BLOCK))


READERS = {  # of a block's two norms
    "attn_norm": r"attn\.(wq_a|wkv|compressor\.wkv|compressor\.wgate|indexer\.weights_proj)\.weight",
    "ffn_norm": r"ffn\.(gate|experts\.\d+\.w[13]|shared_experts\.w[13])\.weight",
}
WRITERS = r"attn\.wo_b\.weight|ffn\.(experts\.\d+|shared_experts)\.w2\.weight"


def check(config: Mapping[str, Any]) -> None:
    """Raises ConfigError where the hidden dimension does not consist of blocks."""
    hidden = config["text_config"]["hidden_size"]
    if hidden % BLOCK:
        raise ConfigError(f"hidden_size = {hidden} is no multiple of {BLOCK}: convert without --rotate")


def rotation_of(spec: TensorSpec, config: Mapping[str, Any]) -> Rotation | None:
    """What R does to a tensor; None when nothing."""
    name, text = spec.name, config["text_config"]
    if name == "embed.weight" or name.startswith("image_") or name == "aligner.w2.bias":
        return Rotation(columns=True)
    if name == "aligner.w2.weight":
        return Rotation(rows_from=0)
    if name == "head.weight":
        return Rotation(columns=True, norm="norm.weight")
    if name == "norm.weight":
        return Rotation(ones=True)
    if name == "mtp.0.main_proj.weight":  # its input: the mean streams of the target layers, side by side
        return Rotation(columns=True)
    match = re.fullmatch(r"(layers\.\d+)\.(.+)", name)
    if match is None:
        return None
    layer, rest = match.groups()
    if rest in ("attn_norm.weight", "ffn_norm.weight"):
        return Rotation(ones=True)
    if rest in ("hc_attn_fn", "hc_ffn_fn"):
        return Rotation(columns=True)
    if rest == "engram.wkv.weight":  # one key per stream, which stay; then the value
        return Rotation(rows_from=text["hc_mult"] * text["hidden_size"])
    if re.fullmatch(WRITERS, rest):
        return Rotation(rows_from=0)
    for norm, pattern in READERS.items():
        if re.fullmatch(pattern, rest):
            return Rotation(columns=True, norm=f"{layer}.{norm}.weight")
    return None


def read_block(path: Path, hidden: int) -> Floats | None:
    """The block [32, 32] of a checkpoint's rotation file; None for the identity. Raises CheckpointError."""
    stored, offset = read_header(path).get(KEY, (None, 0)) if path.is_file() else (None, 0)
    if stored != Stored(KEY, "F32", (hidden, hidden)):
        raise CheckpointError(
            f"{path}: holds no {KEY} F32 [{hidden}, {hidden}]; copy the checkpoint again, with optional/"
        )
    stripe = np.fromfile(path, np.float32, BLOCK * hidden, offset=offset)[: BLOCK * hidden].reshape(-1, hidden)
    if (stripe[:, : len(stripe)] == np.eye(len(stripe), dtype=np.float32)).all():
        return None
    if hidden % BLOCK:
        raise CheckpointError(f"{path}: rotates a hidden size of {hidden}, which is no multiple of {BLOCK}")
    return np.ascontiguousarray(stripe[:, :BLOCK])


def hadamard(values: Floats, axis: int) -> Floats:
    """Multiply blocks of 32 along ``axis`` (0 or 1) of a matrix by ``block()``, which is symmetric.

    Sums are formed in five rounds of one addition each, in a fixed order: a library's matrix product would round
    differently from processor to processor, and a conversion must come out the same wherever it goes on.
    """
    rows, columns = values.shape
    after = columns if axis == 0 else 1  # elements between neighbours of a block
    for half in (1, 2, 4, 8, 16):
        pairs = values.reshape(-1, 2, half * after)
        values = np.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), axis=1)
    return values.reshape(rows, columns) / np.float32(np.sqrt(BLOCK))


def apply(rotation: Rotation, values: Floats, first_row: int, norm: Floats | None, kernels: Any) -> Floats:
    """values [rows, columns]: rows ``first_row`` onwards of a tensor, overwritten; norm [columns], of
    ``rotation.norm``; kernels: module ``native`` or ``quant.reference``."""
    if rotation.ones:
        return np.ones_like(values)
    if norm is not None:
        values *= norm
    if rotation.columns:
        kernels.hadamard(values)
    if rotation.rows_from is not None:
        start = max(rotation.rows_from - first_row, 0)
        if start < len(values):
            values = np.concatenate([values[:start], hadamard(values[start:], 0)])
    return values
