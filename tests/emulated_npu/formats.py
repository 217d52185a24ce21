"""FRACTAL_NZ as a real layout. `npu_format_cast` moves the elements into 16-row tiles, so that an operator that reads
an NZ tensor as if it were row-major gets wrong numbers, and PyTorch's own operators refuse such tensors: torch_npu
would convert them back behind the caller's back, or fail, depending on the operator.

Layout (CANN documentation, data formats): [.., M, N] -> [.., ceil(N / c0), ceil(M / 16), 16, c0], c0 elements of 32
bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from .library import EmulationError

ND, NZ = 2, 29
#: Operators that may see an NZ tensor: they look at its shape only, or move it as a whole.
WHOLE = {"aten::record_stream", "aten::is_same_size"}
_cast_at: set[int] = set()


def block(dtype: torch.dtype) -> int:
    return 32 // dtype.itemsize


def to_nz(x: torch.Tensor) -> torch.Tensor:
    """[.., M, N] row-major -> [.., N/c0, M/16, 16, c0]; padding is zero."""
    c0 = block(x.dtype)
    rows, columns = x.shape[-2:]
    padded = torch.nn.functional.pad(x, (0, -columns % c0, 0, -rows % 16))
    tiles = padded.unflatten(-1, (-1, c0)).unflatten(-3, (-1, 16))  # [.., M/16, 16, N/c0, c0]
    return tiles.movedim(-2, -4).contiguous()


def from_nz(tiles: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[.., N/c0, M/16, 16, c0] -> [.., rows, columns] row-major."""
    flat = tiles.movedim(-4, -2).flatten(-2).flatten(-3, -2)
    return flat[..., :rows, :columns].contiguous()


def note_cast(address: int) -> None:
    _cast_at.add(address)


def is_nz(tensor: torch.Tensor) -> bool:
    if not _cast_at or tensor.untyped_storage().data_ptr() not in _cast_at:
        return False
    import torch_npu

    return bool(torch_npu.get_npu_format(tensor) == NZ)  # the allocator may have given the address to another tensor


def write_nz(target: Any, source: torch.Tensor) -> None:
    """target: the TensorArgument of an NZ tensor; source: row-major values."""
    from . import memory

    tiles = to_nz(source)
    if tuple(tiles.shape) != tuple(target.storage):
        raise EmulationError(
            f"FRACTAL_NZ storage of {list(source.shape)} is {list(tiles.shape)}, not {list(target.storage)}"
        )
    note_cast(target.address)
    memory.view(target.address, target.dtype, tuple(tiles.shape), tuple(tiles.stride())).copy_(tiles)


def storage_shape(sizes: torch.Size, dtype: torch.dtype) -> tuple[int, ...]:
    rows, columns = sizes[-2:]
    return (*sizes[:-2], -(-columns // block(dtype)), -(-rows // 16), 16, block(dtype))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Row-major CPU copy of an NZ tensor: a whole one, or one matrix of a stack."""
    from . import memory

    if not tensor.is_contiguous():
        raise EmulationError(f"a view with strides {list(tensor.stride())} of a FRACTAL_NZ tensor")
    rows, columns = tensor.shape[-2:]
    stored = storage_shape(tensor.shape, tensor.dtype)
    skipped, inside = divmod(int(tensor.storage_offset()), rows * columns)
    if inside:
        raise EmulationError("a view into the middle of a FRACTAL_NZ matrix")
    strides = [1]
    for n in reversed(stored[1:]):
        strides.insert(0, strides[0] * n)
    matrix = stored[-4] * stored[-3] * stored[-2] * stored[-1] * tensor.element_size()
    tiles = memory.view(tensor.untyped_storage().data_ptr() + skipped * matrix, tensor.dtype, stored, tuple(strides))
    return from_nz(tiles, rows, columns)


def check_plain(operator: str, tensor: torch.Tensor) -> None:
    if _cast_at and operator not in WHOLE and is_nz(tensor):
        raise EmulationError(
            f"{operator}: a FRACTAL_NZ tensor of shape {list(tensor.shape)} was used as if it were row-major"
        )
