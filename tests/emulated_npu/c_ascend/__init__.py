"""torch.ops._C_ascend: the operators of vllm-ascend's C++ extension, with the schemas of its own registration source.

A reference is a function of CPU tensors that returns CPU tensors, so each can be tested alone, on any machine. What has
none raises NotImplementedError with its name. PyTorch does not hand over keyword arguments that equal the schema's
default: references repeat those defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Reference = Callable[..., Any]
REFERENCES: dict[str, Reference] = {}


def reference(function: Reference) -> Reference:
    REFERENCES[function.__name__] = function
    return function
