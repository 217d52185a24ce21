"""Operators that no fused kernel serves: the reference's PyTorch, whose operators run on the device as they are.

They read nothing on the host and their shapes do not depend on data, so that graphs capture them.
"""

from __future__ import annotations

from ..hyper_connections import hc_coefficients, hc_collapse
from ..registry import REFERENCE

for operator in (hc_coefficients, hc_collapse):
    operator.register("npu")(operator.implementations[REFERENCE])
