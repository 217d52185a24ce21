"""triton.language.extra.cann: Triton-Ascend's additions, for the interpreter."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("libdevice", "extension"):
        return importlib.import_module(f"triton.language.extra.cann.{name}")
    raise AttributeError(name)
