"""triton.language.extra.cann.extension on numpy: slices and sorting of blocks."""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle


def _number(x: Any) -> int:
    return int(x.handle.data.item()) if hasattr(x, "handle") else int(getattr(x, "value", x))


def _block(data: np.ndarray, like: Any) -> Any:
    kind = tl.block_type(like.type.scalar, list(data.shape)) if data.ndim else like.type.scalar
    return tl.tensor(TensorHandle(data, like.handle.dtype), kind)


def _slices(offsets: Any, sizes: Any, strides: Any) -> tuple[slice, ...]:
    where = zip(map(_number, offsets), map(_number, sizes), map(_number, strides), strict=True)
    return tuple(slice(at, at + (n - 1) * step + 1, step) for at, n, step in where)


def sort(x: Any, dim: Any = -1, descending: Any = False) -> Any:
    data = np.sort(x.handle.data, axis=_number(dim))
    return _block(np.flip(data, _number(dim)).copy() if getattr(descending, "value", descending) else data, x)


def extract_slice(full: Any, offsets: Any, sizes: Any, strides: Any) -> Any:
    return _block(full.handle.data[_slices(offsets, sizes, strides)].copy(), full)


def insert_slice(full: Any, part: Any, offsets: Any, sizes: Any, strides: Any) -> Any:
    data = full.handle.data.copy()
    data[_slices(offsets, sizes, strides)] = part.handle.data
    return _block(data, full)


def get_element(source: Any, indices: Any) -> Any:
    value = np.array([source.handle.data[tuple(map(_number, indices))]])
    return tl.tensor(TensorHandle(value, source.handle.dtype), source.type.scalar)
