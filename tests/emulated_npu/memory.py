"""From device addresses to the bytes behind them."""

from __future__ import annotations

import bisect
import ctypes
import threading
from dataclasses import dataclass

import numpy as np
import torch

from .library import FREED, LIBRARY, EmulationError, recent_error


@dataclass(eq=False)
class Segment:
    """One allocation of device memory (torch_npu's caching allocator makes many tensors of one)."""

    begin: int
    size: int
    device: int
    storage: torch.UntypedStorage
    registered: bool  # host memory that a device may use
    live: bool = True


_segments: list[Segment] = []
_begins: list[int] = []
_lock = threading.Lock()
_freed_seen = 0


def refresh() -> None:
    """Forgets allocations that the runtime has freed: later uses are refused, and graphs learn of it."""
    global _freed_seen
    if FREED.value == _freed_seen:
        return
    with _lock:
        _freed_seen = FREED.value
        for at in reversed(range(len(_segments))):
            if not LIBRARY.fakecann_is_live(_begins[at]):
                _segments[at].live = False
                del _segments[at], _begins[at]


def _load(address: int) -> Segment:
    begin, size, host_address = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
    device, kind = ctypes.c_int32(), ctypes.c_int32()
    if LIBRARY.fakecann_segment(address, *map(ctypes.byref, (begin, size, host_address, device, kind))):
        raise EmulationError(recent_error())
    buffer = (ctypes.c_char * size.value).from_address(host_address.value)
    storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    segment = Segment(begin.value, size.value, device.value, storage, kind.value == 1)
    with _lock:
        at = bisect.bisect(_begins, segment.begin)
        _begins.insert(at, segment.begin)
        _segments.insert(at, segment)
    return segment


def segment_of(address: int) -> Segment:
    """The live allocation that holds a device address. Raises EmulationError for host pointers and freed memory."""
    refresh()
    with _lock:
        at = bisect.bisect(_begins, address) - 1
        segment = _segments[at] if at >= 0 else None
    return segment if segment is not None and address < segment.begin + segment.size else _load(address)


def _used_by(segment: Segment, device: int) -> None:
    """A kernel on a device uses the memory."""
    if segment.device != device:
        raise EmulationError(f"a kernel on device {device} used memory of device {segment.device}")
    if segment.registered:
        LIBRARY.fakecann_touch(segment.begin)


def view(
    address: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], device: int | None = None
) -> torch.Tensor:
    """CPU tensor over device memory (of the current device unless told); strides in elements."""
    if 0 in sizes:
        return torch.empty(sizes, dtype=dtype)
    segment = segment_of(address)
    _used_by(segment, torch.npu.current_device() if device is None else device)
    return torch.empty(0, dtype=dtype, device="cpu").set_(
        segment.storage, (address - segment.begin) // dtype.itemsize, sizes, strides
    )


def host(tensor: torch.Tensor) -> torch.Tensor:
    """CPU tensor over the same bytes as an NPU tensor (CPU tensors come back as they are)."""
    if tensor.device.type != "npu":
        return tensor
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    address = tensor.data_ptr()
    segment = segment_of(address)
    _used_by(segment, tensor.device.index)
    out = torch.empty(0, dtype=tensor.dtype, device="cpu")  # a program may have made the NPU the default
    out.set_(segment.storage, (address - segment.begin) // tensor.element_size(), tensor.size(), tensor.stride())
    # Lazy conjugation and negation are marks on the tensor, not on its bytes.
    if tensor.is_conj():
        out = torch._conj(out)
    return torch._neg_view(out) if tensor.is_neg() else out


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
