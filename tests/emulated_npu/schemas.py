"""Operator schemas of vllm-ascend's C++ extension, read from its registration source when the device is set up."""

from __future__ import annotations

import json
import re
from pathlib import Path

#: The library for A2/A3; the source also registers one for 310P.
REGISTRATION = "TORCH_LIBRARY_EXPAND(CONCAT(_C, _ascend), ops)"


def parse(source: str) -> list[str]:
    """csrc/torch_binding.cpp -> ["npu_hc_pre_v3(Tensor x, ...) -> (...)", ...]."""
    body = source[source.rindex(REGISTRATION) :]
    body = re.sub(r"//[^\n]*", "", body)
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    out = []
    for match in re.finditer(r'ops\.def\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)', body):
        pieces = re.findall(r'"((?:[^"\\]|\\.)*)"', match.group(1))
        out.append(re.sub(r"\s+", " ", "".join(json.loads(f'"{p}"') for p in pieces)))
    if len(out) < 50:
        raise ValueError(f"only {len(out)} operator schemas found in the registration source: its layout has changed")
    return out


def write(source: Path, target: Path) -> None:
    target.write_text(json.dumps(parse(source.read_text()), indent=0))
