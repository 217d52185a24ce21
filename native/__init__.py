"""Conversions between number formats and Engram's hash and look-up, compiled: a C library without Python or torch
headers, called on numpy arrays.

Every conversion returns -1, or the index (row-major, of the beginning of its tile or group) of the first value that is
not finite; what the outputs hold then is undefined. The processor must not be set to flush subnormals to zero.
The clear definition of each conversion is the function of the same name in ``quant/reference.py``; of the others, the
operators in ``ops/engram.py``.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Codes = NDArray[np.int8]
Integers = NDArray[np.int64]

GROUP = 32
LOOKUP_BYTES = 8192  # as in formats.h


class NativeMissingError(ImportError):
    """The library was not built when the package was installed."""


def _load() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec(f"{__name__}._kernels")
    return ctypes.CDLL(spec.origin) if spec is not None and spec.origin else None


_library = _load()
available = _library is not None


Arrays = tuple[NDArray[Any], ...]


def _missing(*_: Any) -> int:
    raise NativeMissingError(
        "the compiled kernels are missing: no C compiler was found when this package was installed; install gcc and "
        "install the package again"
    )


def _rows_function(kind: str) -> Callable[..., int]:
    if _library is None:
        return _missing
    function: Any = getattr(_library, f"dsv41_engram_rows_{kind}")
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes, function.restype = [pointer, pointer, *[number] * 5, pointer], number
    return function  # type: ignore[no-any-return]


_rows_bf16, _rows_float = _rows_function("bf16"), _rows_function("float")


def _require(function: str, inputs: Arrays, outputs: Arrays) -> None:
    for array in (*inputs, *outputs):
        if not array.flags.c_contiguous:
            raise ValueError(f"{function}: an array of shape {array.shape} is not contiguous")
    for array in outputs:
        if not array.flags.writeable:
            raise ValueError(f"{function}: an output of shape {array.shape} is read-only")


def _call(function: str, inputs: Arrays, sizes: tuple[int, ...], outputs: Arrays) -> int:
    if _library is None:
        return _missing()
    _require(function, inputs, outputs)
    entry = getattr(_library, f"dsv41_{function}")
    entry.restype = ctypes.c_int64
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*inputs, *outputs)]
    return int(entry(*pointers[: len(inputs)], *map(ctypes.c_int64, sizes), *pointers[len(inputs) :]))


def _expect(function: str, **arrays: tuple[NDArray[Any], type, tuple[int, ...]]) -> None:
    for name, (array, dtype, shape) in arrays.items():
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(
                f"{function}: {name} is {array.dtype} {list(array.shape)}, expected {np.dtype(dtype)} {list(shape)}"
            )


def plain_only(on: bool) -> None:
    """Use the versions without AVX2, for tests."""
    _call("plain_only", (), (int(on),), ())


def int8_from_mxfp4(packed: Bytes, exponents: Bytes, codes: Codes, scales: Floats) -> int:
    """packed [rows, columns / 2], two FP4 codes a byte, exponents [rows, columns / 32] E8M0 -> codes
    [rows, columns], scales [rows]: the smallest BF16 number not below absmax / 127."""
    rows, columns = codes.shape
    _expect(
        "int8_from_mxfp4",
        packed=(packed, np.uint8, (rows, columns // 2)),
        exponents=(exponents, np.uint8, (rows, columns // GROUP)),
        codes=(codes, np.int8, (rows, columns // GROUP * GROUP)),
        scales=(scales, np.float32, (rows,)),
    )
    return _call("int8_from_mxfp4", (packed, exponents), (rows, columns), (codes, scales))


def int8_from_fp8_tiles(weight: Bytes, exponents: Bytes, codes: Codes, scales: Floats) -> int:
    """weight [rows, columns] E4M3, exponents [ceil(rows / 32), ceil(columns / 32)] -> as ``int8_from_mxfp4``."""
    rows, columns = codes.shape
    _expect(
        "int8_from_fp8_tiles",
        weight=(weight, np.uint8, (rows, columns)),
        exponents=(exponents, np.uint8, (-(-rows // GROUP), -(-columns // GROUP))),
        codes=(codes, np.int8, (rows, columns)),
        scales=(scales, np.float32, (rows,)),
    )
    return _call("int8_from_fp8_tiles", (weight, exponents), (rows, columns), (codes, scales))


def engram_int8_from_fp8(weight: Bytes, exponents: Bytes, codes: Codes, scales: Floats) -> int:
    """weight [rows, dim] E4M3, exponents [rows, dim / 32] -> codes [rows, dim], scales [rows, dim / 32],
    powers of two."""
    rows, dim = codes.shape
    _expect(
        "engram_int8_from_fp8",
        weight=(weight, np.uint8, (rows, dim)),
        exponents=(exponents, np.uint8, (rows, dim // GROUP)),
        codes=(codes, np.int8, (rows, dim // GROUP * GROUP)),
        scales=(scales, np.float32, (rows, dim // GROUP)),
    )
    return _call("engram_int8_from_fp8", (weight, exponents), (rows * dim // GROUP,), (codes, scales))


def float_from_mxfp4(packed: Bytes, exponents: Bytes, values: Floats) -> int:
    """packed, exponents as in ``int8_from_mxfp4`` -> values [rows, columns]."""
    rows, columns = values.shape
    _expect(
        "float_from_mxfp4",
        packed=(packed, np.uint8, (rows, columns // 2)),
        exponents=(exponents, np.uint8, (rows, columns // GROUP)),
        values=(values, np.float32, (rows, columns // GROUP * GROUP)),
    )
    return _call("float_from_mxfp4", (packed, exponents), (rows, columns), (values,))


def float_from_fp8(weight: Bytes, exponents: Bytes, tile_rows: int, values: Floats) -> int:
    """weight [rows, columns] E4M3, exponents [ceil(rows / tile_rows), ceil(columns / 32)] -> values [rows, columns]."""
    rows, columns = values.shape
    _expect(
        "float_from_fp8",
        weight=(weight, np.uint8, (rows, columns)),
        exponents=(exponents, np.uint8, (-(-rows // tile_rows), -(-columns // GROUP))),
        values=(values, np.float32, (rows, columns)),
    )
    return _call("float_from_fp8", (weight, exponents), (rows, columns, tile_rows), (values,))


def int8_from_float(values: Floats, codes: Codes, scales: Floats) -> int:
    """values [rows, columns] -> as ``int8_from_mxfp4``."""
    rows, columns = codes.shape
    _expect(
        "int8_from_float",
        values=(values, np.float32, (rows, columns)),
        codes=(codes, np.int8, (rows, columns)),
        scales=(scales, np.float32, (rows,)),
    )
    return _call("int8_from_float", (values,), (rows, columns), (codes, scales))


def hadamard(values: Floats) -> int:
    """Multiply each 32 values [rows, columns] of a row by the orthonormal Hadamard matrix of order 32, in place."""
    _expect("hadamard", values=(values, np.float32, (len(values), values.shape[1] // GROUP * GROUP)))
    return _call("hadamard", (), (values.size // GROUP,), (values,))


def bf16_from_float(values: Floats, out: NDArray[np.uint16]) -> int:
    """values -> bits of the nearest BF16 numbers, ties to even; the same shape."""
    _expect("bf16_from_float", values=(values, np.float32, out.shape), out=(out, np.uint16, values.shape))
    return _call("bf16_from_float", (values,), (values.size,), (out,))


def float_from_bf16(values: NDArray[np.uint16], out: Floats) -> int:
    """Bits of BF16 numbers -> their values; the same shape."""
    _expect("float_from_bf16", values=(values, np.uint16, out.shape), out=(out, np.float32, values.shape))
    return _call("float_from_bf16", (values,), (values.size,), (out,))


def engram_rows(
    chunks: Integers, ids: Integers, rows: int, chunk_rows: int, groups: int, out: Floats | NDArray[np.uint16]
) -> None:
    """Dequantised rows of an INT8 table in memory.

    chunks [n, 2]: addresses of ``chunk_rows`` rows of codes and of their float32 scales, ``groups`` a row; ids [count]
    -> out [count, dim], float32 or the bits of BF16, zeros for an id not in [0, rows). The memory behind the addresses
    is trusted to be there."""
    count, dim = out.shape
    if not groups <= dim <= LOOKUP_BYTES:
        raise ValueError(f"engram_rows: rows of {dim} codes, expected {groups} (scales of a row) to {LOOKUP_BYTES}")
    _expect(
        "engram_rows",
        chunks=(chunks, np.int64, (-(-rows // chunk_rows), 2)),
        ids=(ids, np.int64, (count,)),
        out=(out, np.float32 if out.dtype == np.float32 else np.uint16, (count, dim // groups * groups)),
    )
    _require("engram_rows", (chunks, ids), (out,))
    addresses = chunks.ctypes.data, ids.ctypes.data, out.ctypes.data
    engram_rows_at(*addresses, count, rows, chunk_rows, dim, groups, out.dtype == np.uint16)


def engram_rows_at(
    chunks: int, ids: int, out: int, count: int, rows: int, chunk_rows: int, dim: int, groups: int, bf16: bool
) -> None:
    """``engram_rows`` by the addresses of its arrays, which are as described there: a quarter of its cost, which counts
    where a decode step looks up a few hundred rows."""
    (_rows_bf16 if bf16 else _rows_float)(chunks, ids, count, rows, chunk_rows, dim, groups, out)


def hash_ngrams(
    ngrams: Integers, multipliers: Integers, primes: Integers, offsets: Integers, pad: int, out: Integers
) -> None:
    """ngrams [T, n], multipliers [layers, n], primes [layers, n - 1, heads], offsets [layers, (n - 1) heads] -> out
    [layers, T, (n - 1) heads]."""
    tokens, orders = ngrams.shape
    layers, _, heads = primes.shape
    columns = (orders - 1) * heads
    _expect(
        "hash_ngrams",
        ngrams=(ngrams, np.int64, (tokens, orders)),
        multipliers=(multipliers, np.int64, (layers, orders)),
        primes=(primes, np.int64, (layers, orders - 1, heads)),
        offsets=(offsets, np.int64, (layers, columns)),
        out=(out, np.int64, (layers, tokens, columns)),
    )
    _call("hash_ngrams", (ngrams, multipliers, primes, offsets), (tokens, orders, layers, heads, pad), (out,))
