"""INT8 products of a few rows, compiled by numba: reading the weight once is all they may cost."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def integer_product(codes: Any, weight: Any, out: Any) -> None:
    """codes [M, K] int8, weight [N, K] int8, out [M, N] float32, filled in place.

    Sums are exact in int32 for K up to 133,152. One thread: LLVM turns the inner loop into
    multiply-add instructions on 16 values at a time (``benchmarks/README.md``).
    """
    for n in range(weight.shape[0]):
        for m in range(codes.shape[0]):
            total = np.int32(0)
            for k in range(codes.shape[1]):
                total += np.int32(codes[m, k]) * np.int32(weight[n, k])
            out[m, n] = total
