"""triton.language.extra.cann.libdevice on numpy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle


def _elementwise(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def apply(x: Any) -> Any:
        return tl.tensor(TensorHandle(function(x.handle.data).astype(x.handle.data.dtype), x.handle.dtype), x.type)

    return apply


nearbyint = rint = _elementwise(np.rint)  # to nearest, ties to even
round = _elementwise(lambda x: np.trunc(x + np.copysign(0.5, x)))  # ties away from zero
tanh = _elementwise(np.tanh)
isnan = _elementwise(np.isnan)
