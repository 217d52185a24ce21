"""Operators that are replaced as a whole, by name, at the dispatcher: _C_ascend and ATB."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import aten, formats, graphs, memory, recorder
from .library import WAITING, EmulationError

Reference = Callable[..., Any]


def _host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return formats.plain(value) if formats.is_nz(value) else memory.host(value)
    return [_host(v) for v in value] if isinstance(value, (list, tuple)) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []


def _check_nz(name: str, weight: Any) -> None:
    if not all(formats.is_nz(t) for t in _tensors(weight)):
        raise EmulationError(f"{name}: the weight must be FRACTAL_NZ (npu_format_cast to 29)")


def kernel(namespace: str, name: str, references: dict[str, Reference], writes: bool = False) -> Callable[..., Any]:
    """The dispatcher's kernel: device tensors become CPU views, results go to the device, a capture records it.

    writes: the operator changes its arguments and returns nothing.
    """

    def run(*arguments: Any, **keywords: Any) -> Any:
        if name not in references:
            raise NotImplementedError(f"{namespace}::{name} has no reference in the emulated NPU")
        if "_weight_nz" in name:
            _check_nz(name, arguments[1])
        if WAITING.value:
            graphs.check_launch(torch.npu.current_stream().npu_stream)
        if recorder.active():
            recorder.note(namespace, name, arguments, keywords)
        positional, named = [_host(a) for a in arguments], {k: _host(v) for k, v in keywords.items()}
        if writes and graphs.state.update is not None:  # an update of a task group runs nothing
            run = partial(references[name], *positional, **named)
            graphs.record(name, run, *_tensors([*positional, *named.values()]))
            return None
        result = references[name](*positional, **named)
        device = next(
            (t.device for t in _tensors([*arguments, *keywords.values()]) if t.device.type == "npu"),
            aten.current_device(),
        )
        inputs = {
            id(h): d
            for h, d in zip(
                _tensors([*positional, *named.values()]), _tensors([*arguments, *keywords.values()]), strict=True
            )
        }
        given = result if isinstance(result, tuple) else (result,)
        out = [
            r if not isinstance(r, torch.Tensor) else inputs[id(r)] if id(r) in inputs else memory.to_device(r, device)
            for r in given
        ]
        if graphs.state.capture is not None or graphs.state.update is not None:
            fresh = [
                (i, memory.host(o))
                for i, (o, r) in enumerate(zip(out, given, strict=True))
                if isinstance(r, torch.Tensor) and id(r) not in inputs
            ]

            def again() -> None:
                computed = references[name](*positional, **named)
                computed = computed if isinstance(computed, tuple) else (computed,)
                for i, target in fresh:
                    target.copy_(computed[i])

            graphs.record(name, again, *_tensors([*positional, *named.values()]), *(t for _, t in fresh))
        return tuple(out) if isinstance(result, tuple) else out[0]

    return run
