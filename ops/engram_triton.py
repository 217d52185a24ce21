"""Engram look-up on Ascend NPUs, in Triton-Ascend: rows of device memory, or of host memory that the device reads.

One program serves a block of tokens in one hash column. Ids outside the table give zeros; no address is made of them.
Products are rounded to BF16 once, to nearest even.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _copy_row(codes, scales, row, inside, out, at, DIM: tl.constexpr, GROUPS: tl.constexpr):
    """Row ``row`` of a table, or zeros unless ``inside``, to row ``at`` of ``out``; GROUPS 0: the table is BF16."""
    PARTS: tl.constexpr = GROUPS if GROUPS > 0 else 1
    part = tl.arange(0, PARTS)
    place = part[:, None] * (DIM // PARTS) + tl.arange(0, DIM // PARTS)[None, :]
    values = tl.load(codes + row * DIM + place).to(tl.float32)
    if GROUPS > 0:
        values = values * tl.load(scales + row * PARTS + part)[:, None]
    tl.store(out + at * DIM + place, tl.where(inside, values, 0.0).to(out.dtype.element_ty))


@triton.jit
def lookup(
    codes, scales, ids, out, rows, tokens, columns, DIM: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):
    """From device memory: codes [rows, DIM], scales [rows, GROUPS], ids [tokens, columns] -> out [.., .., DIM]."""
    column = tl.program_id(1)
    first = tl.program_id(0) * BLOCK
    for token in range(first, tl.minimum(first + BLOCK, tokens)):
        at = token * columns + column
        row = tl.load(ids + at)
        inside = (row >= 0) & (row < rows)
        _copy_row(codes, scales, tl.where(inside, row, 0), inside, out, at, DIM, GROUPS)


@triton.jit
def lookup_mapped(
    addresses, ids, out, rows, tokens, columns,
    CHUNK_ROWS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From host memory: addresses [chunks, 2], where the codes and the scales of CHUNK_ROWS rows lie."""
    column = tl.program_id(1)
    first = tl.program_id(0) * BLOCK
    for token in range(first, tl.minimum(first + BLOCK, tokens)):
        at = token * columns + column
        row = tl.load(ids + at)
        inside = (row >= 0) & (row < rows)
        row = tl.where(inside, row, 0)
        chunk = row // CHUNK_ROWS
        own = (row - chunk * CHUNK_ROWS).to(tl.int32)  # the bytes of a chunk are fewer than 2 ** 31
        scales = tl.load(addresses + chunk * 2 + 1).to(tl.pointer_type(tl.float32))
        codes = tl.load(addresses + chunk * 2)
        if GROUPS > 0:
            _copy_row(codes.to(tl.pointer_type(tl.int8)), scales, own, inside, out, at, DIM, GROUPS)
        else:
            _copy_row(codes.to(tl.pointer_type(tl.bfloat16)), scales, own, inside, out, at, DIM, GROUPS)


def _grid(tokens: int, columns: int) -> tuple[tuple[int, int], int]:
    """Programs, and tokens of each: few tokens are spread as far as they go, many share programs."""
    block = 1 if tokens <= 64 else 16
    return (-(-tokens // block), columns), block


def lookup_npu(table: Tensor, scale: Tensor | None, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """``ops.engram_lookup`` on an NPU."""
    rows, dim = table.shape
    out = torch.empty(*ids.shape, dim, dtype=dtype, device=ids.device)
    groups = 0 if scale is None else scale.shape[1]
    grid, block = _grid(*ids.shape)
    if out.numel():
        scales = table if scale is None else scale
        lookup[grid](table, scales, ids.contiguous(), out, rows, *ids.shape, DIM=dim, GROUPS=groups, BLOCK=block)
    return out


def lookup_mapped_npu(
    addresses: Tensor, ids: Tensor, rows: int, chunk_rows: int, dim: int, groups: int, dtype: torch.dtype
) -> Tensor:
    """``ops.engram_lookup_mapped`` on an NPU."""
    out = torch.empty(*ids.shape, dim, dtype=dtype, device=ids.device)
    grid, block = _grid(*ids.shape)
    if out.numel():
        sizes = {"CHUNK_ROWS": chunk_rows, "DIM": dim, "GROUPS": groups, "BLOCK": block}
        lookup_mapped[grid](addresses, ids.contiguous(), out, rows, *ids.shape, **sizes)
    return out
