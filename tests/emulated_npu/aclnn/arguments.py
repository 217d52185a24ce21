"""Arguments of an aclnn call, from registers and stack to tensors (System V ABI for x86_64)."""

from __future__ import annotations

import ctypes
import os
import struct
from ctypes import POINTER, c_int32, c_int64, c_uint8, c_uint64, c_void_p
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from .. import formats, memory, recorder
from ..library import EmulationError

#: aclDataType
DTYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int16,
    9: torch.int64,
    11: torch.float64,
    12: torch.bool,
    27: torch.bfloat16,
}
TENSOR, SCALAR, INTS, BOOLS, FLOATS, TENSORS, SCALARS = range(1, 8)


class _Object(ctypes.Structure):
    """As `Object` in cann/opapi.c."""

    _fields_ = [
        ("kind", c_int32),
        ("dtype", c_int32),
        ("format", c_int32),
        ("pad", c_int32),
        ("n", c_uint64),
        ("storage_n", c_uint64),
        ("offset", c_int64),
        ("data", c_void_p),
        ("values", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("storage", POINTER(c_int64)),
        ("scalar", c_uint8 * 16),
    ]


@dataclass
class TensorArgument:
    """An aclTensor: a view of a storage, and how the storage is laid out."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    format: int
    storage: tuple[int, ...]
    address: int

    def attach(self) -> torch.Tensor:
        """CPU tensor over the device memory; an NZ tensor becomes a row-major copy, since only whole-tensor
        readers take it.
        """
        if 0 in self.sizes:
            return torch.empty(self.sizes, dtype=self.dtype)
        if self.format != formats.NZ:
            return memory.view(self.address + self.offset * self.dtype.itemsize, self.dtype, self.sizes, self.strides)
        strides = [1]
        for n in reversed(self.storage[1:]):
            strides.insert(0, strides[0] * n)
        tiles = memory.view(self.address, self.dtype, self.storage, tuple(strides))
        # The view may be the transpose of what was cast: the last two of the untransposed shape were tiled.
        transposed = len(self.strides) > 1 and self.strides[-1] != 1
        rows, columns = (self.sizes[-1], self.sizes[-2]) if transposed else self.sizes[-2:]
        plain = formats.from_nz(tiles, rows, columns)
        if plain.dim() > len(self.sizes):  # one matrix of a stack, taken by offset
            plain = plain.flatten(0, plain.dim() - 3)[self.offset // (rows * columns)]
        plain = plain.transpose(-1, -2) if transposed else plain
        if plain.shape != torch.Size(self.sizes):
            raise EmulationError(f"a FRACTAL_NZ tensor stored as {list(self.storage)} was viewed as {list(self.sizes)}")
        return plain

    def __str__(self) -> str:
        text = recorder.describe(torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device="meta"))
        return text + (":NZ" if self.format == formats.NZ else "")


def _object(pointer: int) -> Any:
    o = _Object.from_address(pointer)
    if o.kind == TENSOR:
        return TensorArgument(
            DTYPES[o.dtype],
            tuple(o.values[: o.n]),
            tuple(o.strides[: o.n]),
            o.offset,
            o.format,
            tuple(o.storage[: o.storage_n]),
            o.data or 0,
        )
    if o.kind == SCALAR:
        dtype = DTYPES[o.dtype]
        return torch.frombuffer(bytearray(o.scalar), dtype=dtype)[0].item()
    if o.kind in (TENSORS, SCALARS):
        return [_object(p & (2**64 - 1)) for p in o.values[: o.n]]
    if o.kind == FLOATS:
        return list(struct.unpack(f"{o.n}d", struct.pack(f"{o.n}q", *o.values[: o.n])))
    if o.kind in (INTS, BOOLS):
        return list(o.values[: o.n])
    raise EmulationError(f"the argument at 0x{pointer:x} is no aclnn object")


def decode(
    parameters: list[tuple[str, str]], integers: Any, doubles: Any, stack: Any
) -> tuple[SimpleNamespace, int, int]:
    """-> (arguments by name, where the workspace size goes, where the executor goes)."""
    position = {"integer": 0, "double": 0, "stack": 0}

    def take(kind: str) -> int:
        registers, room = (integers, 6) if kind == "integer" else (doubles, 8)
        if position[kind] < room:
            position[kind] += 1
            value = registers[position[kind] - 1]
            return value if kind == "integer" else struct.unpack("Q", struct.pack("d", value))[0]
        position["stack"] += 1
        return int(stack[position["stack"] - 1])

    values: dict[str, Any] = {}
    for name, kind in parameters:
        raw = take("double" if kind in "df" else "integer")
        if kind in "TLAS":
            values[name] = _object(raw) if raw else None
        elif kind == "i":
            values[name] = raw - 2**64 if raw >= 2**63 else raw
        elif kind == "w":  # 32-bit integer: the upper half of the register is undefined
            values[name] = struct.unpack("i", struct.pack("I", raw & 0xFFFFFFFF))[0]
        elif kind == "b":
            values[name] = bool(raw & 1)
        elif kind == "d":
            values[name] = struct.unpack("d", struct.pack("Q", raw))[0]
        elif kind == "f":
            values[name] = struct.unpack("f", struct.pack("I", raw & 0xFFFFFFFF))[0]
        elif kind == "s":
            values[name] = ctypes.string_at(raw).decode() if raw else ""
        else:
            raise AssertionError(f"unknown parameter type {kind}")
    return SimpleNamespace(**values), take("integer"), take("integer")


def write(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


def attach(values: SimpleNamespace) -> SimpleNamespace:
    """Replaces descriptions of tensors by CPU views of their memory."""

    def one(value: Any) -> Any:
        if isinstance(value, TensorArgument):
            return value.attach()
        return [one(v) for v in value] if isinstance(value, list) else value

    return SimpleNamespace(**{k: one(v) for k, v in vars(values).items()}, described=values)


def device_views(values: SimpleNamespace) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in vars(values).values():
        found += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, torch.Tensor)]
    return found


def shown(value: Any) -> Any:
    if isinstance(value, TensorArgument):
        return str(value)
    return "[" + ", ".join(str(shown(v)) for v in value) + "]" if isinstance(value, list) else value


def _readable(address: int, n: int) -> bytes | None:
    """Bytes of this process at an address that may be anything."""
    if not 0x10000 < address < 1 << 47:
        return None
    try:
        with open(f"/proc/{os.getpid()}/mem", "rb", buffering=0) as process:
            process.seek(address)
            return process.read(n)
    except OSError:
        return None


def sniff(integers: Any, doubles: Any, stack: Any, limit: int = 40) -> str:
    """A guess at the arguments of an unknown operator, for whoever writes its handler: in order, integers first."""
    shown_: list[str] = []
    here = ctypes.addressof(stack.contents)
    raws = [*integers[:6], *stack[:limit]]
    for raw, following in zip(raws, [*raws[1:], 0], strict=True):
        if all(here < r < here + (1 << 20) for r in (raw, following)):
            break  # the two results, which come last, lie on the caller's stack
        head = _readable(raw, ctypes.sizeof(_Object))
        kind = struct.unpack("i", head[:4])[0] if head and len(head) >= 4 else 0
        text = _readable(raw, 32)
        if head and TENSOR <= kind <= SCALARS and head[12:16] == b"\0\0\0\0":
            shown_.append(str(shown(_object(raw))))
        elif (
            text
            and text.split(b"\0")[0].isascii()
            and 0 < len(text.split(b"\0")[0]) < 32
            and text.split(b"\0")[0].decode().isprintable()
        ):
            shown_.append(repr(text.split(b"\0")[0].decode()))
        else:
            shown_.append(str(raw - 2**64 if raw >= 2**63 else raw) if raw < 1 << 32 or raw >= 2**63 else hex(raw))
    return f"integers {', '.join(shown_)}; floating point {[f'{doubles[i]:.9g}' for i in range(8)]}"
