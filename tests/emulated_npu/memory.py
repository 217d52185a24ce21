"""From device addresses to the bytes behind them."""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from .library import LIBRARY, EmulationError, recent_error


@dataclass(eq=False)
class Segment:
    """One allocation of device memory (torch_npu's caching allocator makes many tensors of one)."""

    begin: int
    size: int
    device: int
    storage: torch.UntypedStorage
    live: bool = True


_segments: list[Segment] = []
_begins: list[int] = []


def _load(address: int) -> Segment:
    begin, size, host, device = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int32()
    if LIBRARY.fakecann_segment(address, *map(ctypes.byref, (begin, size, host, device))):
        raise EmulationError(recent_error())
    buffer = (ctypes.c_char * size.value).from_address(host.value)
    storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    segment = Segment(begin.value, size.value, device.value, storage)
    at = bisect.bisect(_begins, segment.begin)
    _begins.insert(at, segment.begin)
    _segments.insert(at, segment)
    return segment


def segment_of(address: int) -> Segment:
    """The live allocation that holds a device address. Raises EmulationError for host pointers and freed memory."""
    at = bisect.bisect(_begins, address) - 1
    if at >= 0:
        segment = _segments[at]
        if address < segment.begin + segment.size:
            return segment
    return _load(address)


def forget(begin: int) -> None:
    """The runtime freed the allocation: later uses are refused, and graphs that captured it learn of it."""
    at = bisect.bisect(_begins, begin) - 1
    if at >= 0 and _begins[at] == begin:
        _segments[at].live = False
        del _segments[at], _begins[at]


def view(address: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """CPU tensor over device memory; strides in elements."""
    if 0 in sizes:
        return torch.empty(sizes, dtype=dtype)
    segment = segment_of(address)
    return torch.empty(0, dtype=dtype).set_(
        segment.storage, (address - segment.begin) // dtype.itemsize, sizes, strides
    )


def host(tensor: torch.Tensor) -> torch.Tensor:
    """CPU tensor over the same bytes as an NPU tensor (CPU tensors come back as they are)."""
    if tensor.device.type != "npu":
        return tensor
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    address = tensor.data_ptr()
    segment = segment_of(address)
    out = torch.empty(0, dtype=tensor.dtype)
    return out.set_(segment.storage, (address - segment.begin) // tensor.element_size(), tensor.size(), tensor.stride())


def to_device(result: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A new NPU tensor with the values and strides of a CPU tensor."""
    out = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device=device)
    if result.numel():
        host(out).copy_(result)
    return out


def translate(addresses: np.ndarray, width: int, device: int) -> np.ndarray:
    """uint64 device addresses -> uint64 host addresses, as a kernel on `device` may use them."""
    flat = np.ascontiguousarray(addresses, dtype=np.uint64).reshape(-1)
    out = np.empty_like(flat)
    bad = LIBRARY.fakecann_translate(flat.ctypes.data, out.ctypes.data, flat.size, width, device)
    if bad >= 0:
        raise EmulationError(recent_error())
    return out.reshape(addresses.shape)
