"""Comparing an implementation with the reference."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .examples import Example, examples
from .registry import REFERENCE, Operator, operators

# Relative to the largest magnitude of a row: float32 sums in another order; two BF16 roundings.
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}

QUANTISING = {"quantize_per_token", "quantize_index", "rms_norm_quantize", "store_compressed"}


@dataclass(frozen=True)
class Comparison:
    """One implementation on one example. ``error``: largest deviation relative to its row's largest value."""

    operator: str
    implementation: str
    title: str
    dtype: torch.dtype
    absolute: float
    error: float
    bound: float
    refused: str = ""  # what the implementation said instead of a result

    @property
    def passed(self) -> bool:
        """Within the bound; NaN is not, and no result is not."""
        return not self.refused and self.error <= self.bound


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, tuple) else []


def _run(op: Operator[..., Any], name: str, example: Example) -> list[Tensor]:
    args, function = op.packed(copy.deepcopy(example.args), name), op.implementations[name]
    result = function(*args, **example.kwargs)
    found = [args[example.mutated]] if example.mutated is not None else _tensors(result)
    found = [result.cpu() for result in found]  # compared on the host: devices lack float64
    if op.name == "select_rows":  # in any order, but padding last: what reads them stops at the first -1
        if any(bool(((rows < 0).int().diff(dim=1) < 0).any()) for rows in found):
            raise ValueError("select_rows: a selected row stands behind padding")
        found = [rows.sort(descending=True).values for rows in found]
    return found


def _on_host(value: Any) -> Any:
    """Arguments for the reference, which is the yardstick and runs on the host, whatever the device."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, tuple):
        return tuple(_on_host(item) for item in value)
    move = getattr(value, "to_host", None)
    return value if move is None else move()


def _deviation(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return torch.inf, torch.inf
    if not wanted.numel():
        return 0.0, 0.0
    difference = (found.double() - wanted.double()).abs()
    size = wanted.double().abs().amax(-1, keepdim=True).clamp_min(1e-30) if wanted.dim() else wanted.double().abs()
    # NaN where the reference has none is the largest deviation there is; max() below would drop it
    absolute, relative = (float(x.nan_to_num(torch.inf, torch.inf).max()) for x in (difference, difference / size))
    return absolute, relative


def _bound(operator: Operator[..., Any], result: Tensor, dtype: torch.dtype) -> float:
    if not result.is_floating_point():
        return 1.0 / 127 + 1e-6 if operator.name in QUANTISING else 0.0  # a tie may round either way
    if result.dtype == torch.float16:
        return 2.0**-10
    if operator.name == "moe_w8a8" and dtype == torch.bfloat16:
        return 2.0**-6  # fused kernels quantise what the reference rounds to BF16 first
    return BOUND[dtype]


def compare(seed: int = 0, device: str = "cpu", only: Collection[str] = ()) -> Iterator[Comparison]:
    """Every implementation of every operator (or of ``only`` these) on every example, in float32 and BF16."""
    declared = {op.name: op for op in operators()}
    for dtype in (torch.float32, torch.bfloat16):
        for example in examples(seed, device, dtype):
            op = declared[example.operator]
            if only and op.name not in only:
                continue
            wanted = _run(op, REFERENCE, replace(example, args=_on_host(example.args), kwargs=example.kwargs))
            op.selection(device.partition(":")[0])  # a device's implementations register when it is first asked for
            for name in op.implementations:
                if name not in (REFERENCE, device.partition(":")[0]) or name in example.refused:
                    continue
                if name == REFERENCE and device != "cpu":
                    continue  # it ran on the host
                yield _compared(op, name, example, wanted, dtype)


def _compared(
    op: Operator[..., Any], name: str, example: Example, wanted: list[Tensor], dtype: torch.dtype
) -> Comparison:
    absolute, error, bound = 0.0, 0.0, 0.0
    try:
        found = _run(op, name, example)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as refusal:
        said = str(refusal).strip().splitlines() or [type(refusal).__name__]
        return Comparison(op.name, name, example.title, dtype, torch.inf, torch.inf, bound, said[0])
    for one, other in zip(found, wanted, strict=True):
        step = _deviation(one, other)
        absolute, error = max(absolute, step[0]), max(error, step[1])
        bound = max(bound, _bound(op, other, dtype))
    return Comparison(op.name, name, example.title, dtype, absolute, error, bound)
