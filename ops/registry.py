"""Operators and their implementations.

An operator is declared by its ``reference``: clear PyTorch, the definition of what it computes.
Other implementations register under the name of what they run on. A call takes the implementation
that the device of its first tensor prefers; ``DSV41_OPS="route=reference,moe_w8a8=cpu"`` overrides
single operators for debugging.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger(__name__)

OVERRIDES = "DSV41_OPS"
REFERENCE = "reference"


class OperatorError(ValueError):
    """An operator or implementation name that does not exist."""


class Operator(Generic[P, R]):
    """A callable that dispatches on the device of its first tensor argument."""

    def __init__(self, reference: Callable[P, R]) -> None:
        self.name = reference.__name__
        self.__doc__, self.__name__ = reference.__doc__, reference.__name__
        self.implementations: dict[str, Callable[P, R]] = {REFERENCE: reference}
        self._packers: dict[str, dict[int, Callable[[torch.Tensor], torch.Tensor]]] = {}
        self._selected: dict[str, Callable[P, R]] = {}

    def register(
        self, name: str, pack: dict[int, Callable[[torch.Tensor], torch.Tensor]] | None = None
    ) -> Callable[[F], F]:
        """Decorator: add an implementation with the reference's signature.

        ``pack``: by position, what brings a weight from the reference's layout into the one that it reads.
        """

        def add(function: F) -> F:
            self.implementations[name] = cast("Callable[P, R]", function)
            self._packers[name] = pack or {}
            self._selected.clear()
            return function

        return add

    def pack(self, position: int, weight: torch.Tensor, implementation: str | None = None) -> torch.Tensor:
        """A weight as the implementation (the one that serves its device) reads it: once, after loading."""
        name = self.selection(weight.device.type) if implementation is None else implementation
        packer = self._packers.get(name, {}).get(position)
        return weight if packer is None else packer(weight)

    def packed(self, args: tuple[Any, ...], implementation: str) -> tuple[Any, ...]:
        """Arguments with every weight packed, for comparisons."""
        packers = self._packers.get(implementation, {})
        return tuple(packers[i](value) if i in packers else value for i, value in enumerate(args))

    def selection(self, device_type: str) -> str:
        """Name of the implementation that serves tensors of ``device_type``. Raises OperatorError."""
        if device_type == "npu":
            from . import npu  # noqa: F401  its adapters register themselves; other machines have no torch_npu
        chosen = overrides().get(self.name)
        if chosen is None:
            return device_type if device_type in self.implementations else REFERENCE
        if chosen not in self.implementations:
            known = ", ".join(sorted(self.implementations))
            raise OperatorError(f"{OVERRIDES}: {self.name} has no implementation {chosen!r}; it has {known}")
        return chosen

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first = next((a for a in args if isinstance(a, torch.Tensor)), None)
        device = first.device.type if first is not None else "cpu"
        function = self._selected.get(device)
        if function is None:
            name = self.selection(device)
            if name == REFERENCE and device != "cpu":
                logger.warning("%s runs as its PyTorch reference on %s: correct, but slow", self.name, device)
            function = self._selected[device] = self.implementations[name]
        return function(*args, **kwargs)


_OPERATORS: dict[str, Operator[..., Any]] = {}


def operator(reference: Callable[P, R]) -> Operator[P, R]:
    """Decorator: declare an operator by its reference implementation."""
    declared = Operator(reference)
    if declared.name in _OPERATORS:
        raise OperatorError(f"operator {declared.name} is declared twice")
    _OPERATORS[declared.name] = declared
    return declared


def overrides() -> dict[str, str]:
    """What ``DSV41_OPS`` asks for: operator name -> implementation name. Raises OperatorError."""
    result: dict[str, str] = {}
    for part in filter(None, (item.strip() for item in os.environ.get(OVERRIDES, "").split(","))):
        name, separator, implementation = part.partition("=")
        if not separator:
            raise OperatorError(f"{OVERRIDES}: {part!r} is not of the form operator=implementation")
        if name not in _OPERATORS:
            raise OperatorError(f"{OVERRIDES}: no operator {name!r}; there are {', '.join(sorted(_OPERATORS))}")
        result[name] = implementation
    return result


def operators() -> Iterator[Operator[..., Any]]:
    """All operators by name."""
    for name in sorted(_OPERATORS):
        yield _OPERATORS[name]


def report(device_type: str) -> dict[str, str]:
    """Operator -> implementation on a device type: part of the startup report. Raises OperatorError."""
    return {op.name: op.selection(device_type) for op in operators()}
