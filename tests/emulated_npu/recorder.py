"""What was called: every operator with dtypes, shapes, strides, storage formats and numbers, as lines that can be kept
as golden data and compared; and counters of the same.

    with recorder.recording() as record:
        model(...)
    record.lines       # ["aclnn aclnnSwiGlu(x=bf16[17,128], dim=-1, out=bf16[17,64])", ...]
    record.counts      # Counter of names
    recorder.difference(golden_lines, record.lines)
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

_SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "b8",
}


@dataclass
class Record:
    lines: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    #: Operators per label, in the order in which the labels were first set: `label` marks layers and steps.
    labels: dict[str, Counter[str]] = field(default_factory=dict)
    label: str = ""


_records: list[Record] = []


def active() -> bool:
    return bool(_records)


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    record = Record()
    _records.append(record)
    try:
        yield record
    finally:
        _records.remove(record)


@contextlib.contextmanager
def labelled(label: str) -> Iterator[None]:
    """Counts what runs inside under `label` (a step, a layer); labels nest: "step 1/layers.0"."""
    before = [(r, r.label) for r in _records]
    for r, outer in before:
        r.label = f"{outer}/{label}" if outer else label
    try:
        yield
    finally:
        for r, old in before:
            r.label = old


def label_layers(model: torch.nn.Module, pattern: str = r"layers\.\d+$") -> None:
    """From now on what each layer of a model runs is counted under its name. pattern: searched in module names."""
    for name, module in model.named_modules():
        found = re.search(pattern, name)
        if found:
            module.forward = under(found.group(0), module.forward)  # type: ignore[method-assign]


def under(label: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with what it runs counted under ``label``."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        with labelled(label):
            return forward(*arguments, **keywords)

    return run


def describe(value: Any, nz: bool = False) -> str:
    if isinstance(value, torch.Tensor):
        text = f"{_SHORT.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{','.join(map(str, value.shape))}]"
        if not value.is_contiguous():
            text += f":{','.join(map(str, value.stride()))}"
        if nz:
            text += ":NZ"
        if value.device.type == "cpu" and not nz and value.dim():
            text += "@host"
        return text
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(describe(v) for v in value) + "]"
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def note(kind: str, name: str, positional: Any = (), named: dict[str, Any] | None = None) -> None:
    """positional and named: arguments of the call; strings are taken as descriptions."""
    parts = [describe(v) for v in positional]
    parts += [f"{k}={describe(v)}" for k, v in (named or {}).items() if v is not None]
    line = f"{kind} {name}({', '.join(parts)})"
    for record in _records:
        record.lines.append(line)
        record.counts[name] += 1
        record.labels.setdefault(record.label, Counter())[name] += 1


def difference(golden: list[str], now: list[str]) -> str:
    """Empty when equal; otherwise a unified diff with three lines of context."""
    return "\n".join(difflib.unified_diff(golden, now, "golden", "now", lineterm="", n=3))
