"""Operators of libopapi.so: torch_npu's own C++ selects and calls them, references here execute them.

A handler declares the parameters of its operator in CANN's order and with CANN's types, e.g.

    @operator("aclnnRmsNorm", "x:T gamma:T epsilon:d y:T rstd:T")
    def rms_norm(a): a.y.copy_(...)

and receives them decoded. Types: T tensor (None for a null pointer), L list of tensors, A array of numbers, S scalar,
i integer, b boolean, d double, f float, s string. An operator without handler is an error that prints what was passed.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from .. import graphs, recorder
from ..library import EmulationError, set_error
from . import arguments

Handler = Callable[[SimpleNamespace], None]
UNSUPPORTED = 161002  # ACLNN_ERR_PARAM_INVALID


@dataclass
class Operator:
    name: str
    parameters: list[tuple[str, str]]
    run: Handler


@dataclass
class Call:
    operator: Operator
    values: SimpleNamespace


OPERATORS: dict[str, Operator] = {}
_pending: dict[int, Call] = {}
_next_handle = [1 << 20]


def operator(name: str, signature: str) -> Callable[[Handler], Handler]:
    parameters = [(n, t) for n, _, t in (part.partition(":") for part in signature.split())]

    def register(run: Handler) -> Handler:
        OPERATORS[name] = Operator(name, parameters, run)
        return run

    return register


def _prepare(name: str, integers: Any, doubles: Any, stack: Any) -> None:
    """First phase: decode, and hand out a handle for the second. `GetMaxWorkspaceSize` has no second."""
    only_asks = name.endswith("GetMaxWorkspaceSize")
    name = name.removesuffix("GetMaxWorkspaceSize")
    if name not in OPERATORS:
        shown = arguments.sniff(integers, doubles, stack)
        raise EmulationError(f"{name} has no reference in tests/emulated_npu/aclnn; it was called with {shown}")
    chosen = OPERATORS[name]
    values, workspace_size, executor = arguments.decode(chosen.parameters, integers, doubles, stack)
    _next_handle[0] += 1
    arguments.write(workspace_size, 0)
    arguments.write(executor, _next_handle[0])
    if not only_asks:
        _pending[_next_handle[0]] = Call(chosen, values)


def _execute(name: str, handle: int) -> None:
    call = _pending.pop(handle)
    if recorder.active():
        recorder.note("aclnn", name, named={k: arguments.shown(v) for k, v in vars(call.values).items()})
    values = arguments.attach(call.values)
    if not graphs.record(name, lambda: call.operator.run(values), *arguments.device_views(values)):
        call.operator.run(values)


def load() -> None:
    """Imports the handlers."""
    from . import attention, matmul, moe, norm  # noqa: F401


def hook(name: bytes, phase: int, integers: Any, doubles: Any, stack: Any) -> int:
    try:
        if phase == 0:
            _prepare(name.decode(), integers, doubles, stack)
        else:
            _execute(name.decode(), integers[2])
    except Exception as error:
        text = str(error) if isinstance(error, EmulationError) else traceback.format_exc(limit=-4)
        print(f"[emulated NPU] {name.decode()}: {text}", flush=True)
        set_error(text)
        return UNSUPPORTED
    return 0
