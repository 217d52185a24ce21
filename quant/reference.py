"""What the compiled kernels compute, written clearly: the functions of ``native``, with the same arguments.

Also what serves where no compiler was at hand; ten to thirty times slower (``benchmarks/quantize.py --kernels``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..ops.mx import TILE, decode_fp4, decode_fp8_rows, decode_fp8_tiles
from ..ops.w8a8 import quantize_channels, quantize_engram_rows
from .rotation import hadamard as hadamard_blocks

Array = NDArray[Any]


def _first_bad(values: Tensor) -> int:
    """-1, or the beginning of the first tile of 32 columns with a value that is not finite."""
    bad = (~torch.isfinite(values)).view(len(values), -1).nonzero()
    return -1 if not len(bad) else int(bad[0, 0]) * values.shape[1] + int(bad[0, 1]) // TILE * TILE


def _tensor(array: Array, dtype: torch.dtype | None = None) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(dtype)


def _channels(values: Tensor, codes: Array, scales: Array) -> int:
    bad = _first_bad(values)
    if bad < 0:
        quantized, scale = quantize_channels(values)
        codes[:], scales[:] = quantized.numpy(), scale[:, 0].numpy()
    return bad


def _fp8(weight: Array, exponents: Array, tile_rows: int) -> Tensor:
    decode = decode_fp8_rows if tile_rows == 1 else decode_fp8_tiles
    return decode(_tensor(weight, torch.float8_e4m3fn), _tensor(exponents))


def int8_from_mxfp4(packed: Array, exponents: Array, codes: Array, scales: Array) -> int:
    return _channels(decode_fp4(_tensor(packed), _tensor(exponents)), codes, scales)


def int8_from_fp8_tiles(weight: Array, exponents: Array, codes: Array, scales: Array) -> int:
    return _channels(_fp8(weight, exponents, TILE), codes, scales)


def engram_int8_from_fp8(weight: Array, exponents: Array, codes: Array, scales: Array) -> int:
    values = _fp8(weight, exponents, 1)
    bad = _first_bad(values)
    if bad < 0:
        quantized, scale = quantize_engram_rows(values)
        codes[:], scales[:] = quantized.numpy(), scale.numpy()
    return bad


def float_from_mxfp4(packed: Array, exponents: Array, values: Array) -> int:
    decoded = decode_fp4(_tensor(packed), _tensor(exponents))
    values[:] = decoded.numpy()
    return _first_bad(decoded)


def float_from_fp8(weight: Array, exponents: Array, tile_rows: int, values: Array) -> int:
    decoded = _fp8(weight, exponents, tile_rows)
    values[:] = decoded.numpy()
    return _first_bad(decoded)


def int8_from_float(values: Array, codes: Array, scales: Array) -> int:
    bad = (~np.isfinite(values)).ravel().nonzero()[0]
    return int(bad[0]) if len(bad) else _channels(_tensor(values), codes, scales)


def hadamard(values: Array) -> int:
    values[:] = hadamard_blocks(values, 1)
    return -1


def bf16_from_float(values: Array, out: Array) -> int:
    rounded = _tensor(values).to(torch.bfloat16)
    out[:] = rounded.view(torch.uint16).numpy()
    bad = (~torch.isfinite(rounded)).flatten().nonzero()
    return int(bad[0]) if len(bad) else -1


def float_from_bf16(values: Array, out: Array) -> int:
    out[:] = _tensor(values).view(torch.bfloat16).float().numpy()
    bad = (~np.isfinite(out)).ravel().nonzero()[0]
    return int(bad[0]) if len(bad) else -1
