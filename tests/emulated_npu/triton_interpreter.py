"""Triton kernels, vllm-ascend's and ours, in Triton's own interpreter, on device memory.

Kernels get device addresses, as on hardware, and every load, store and atomic is translated: a host pointer, freed
memory, another device's memory or an access beyond an allocation is an error. BF16 rounds to nearest even and computes
in float32, which upstream's interpreter does not do (it truncates, and adds BF16 numbers as if they were integers).
Lengths that are no powers of two are allowed, as in Triton-Ascend. A grid of 65,536 programs is refused, as by a
device. Not modelled: unified-buffer capacity.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from . import graphs, memory, recorder
from .library import WAITING

LARGEST_GRID = 65535
COMPARISONS = {np.less, np.greater, np.less_equal, np.greater_equal, np.equal, np.not_equal}


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 -> the bits of BF16, rounded to nearest even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


class _Memory:
    """Stands for `triton._C.libtriton.interpreter`: the same functions, with device addresses."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    @staticmethod
    def _where(pointers: np.ndarray, mask: np.ndarray, width: int) -> np.ndarray:
        """Host addresses; lanes that are masked out may hold anything and are not looked at."""
        mask = np.broadcast_to(mask, pointers.shape)
        out = np.zeros(pointers.shape, dtype=np.uint64)
        if mask.any():
            out[mask] = memory.translate(pointers[mask], width, torch.npu.current_device())
        return out

    def load(self, pointers: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: Any) -> Any:
        return self._real.load(self._where(pointers, mask, np.dtype(dtype).itemsize), mask, other, dtype)

    def store(self, pointers: np.ndarray, value: np.ndarray, mask: np.ndarray) -> Any:
        return self._real.store(self._where(pointers, mask, value.dtype.itemsize), value, mask)

    def atomic_cas(self, pointers: np.ndarray, compare: np.ndarray, value: np.ndarray, semantic: Any) -> Any:
        return self._real.atomic_cas(
            self._where(pointers, np.ones(pointers.shape, bool), value.dtype.itemsize), compare, value, semantic
        )

    def atomic_rmw(
        self, operation: Any, pointers: np.ndarray, value: np.ndarray, mask: np.ndarray, semantic: Any
    ) -> Any:
        return self._real.atomic_rmw(
            operation, self._where(pointers, mask, value.dtype.itemsize), value, mask, semantic
        )


class _Permanent:
    """A patch that is not taken back."""

    @staticmethod
    def restore() -> None:
        return None


def _kept(value: Any) -> Any:
    """An argument as a graph keeps it: the caller may dispose of its tensor after the launch."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def install(interpreter: Any) -> None:
    """Patches the module `triton.runtime.interpreter`, right after its import."""
    import triton.language as tl  # both are still being imported when the interpreter is: use names late

    interpreter._interpreter = _Memory(interpreter._interpreter)
    handle = interpreter.TensorHandle
    builder = interpreter.InterpreterBuilder
    binary, unary, cast = builder.binary_op, builder.unary_op, builder.cast_impl

    def wide(x: Any) -> Any:
        return handle(from_bf16(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if (
            operation in COMPARISONS
        ):  # upstream keeps the operand's dtype for scalars, and `mask & (x != 0.0)` then fails
            return handle(operation(wide(left).data, wide(right).data), tl.int1)
        if left.dtype.scalar == tl.bfloat16:
            return handle(to_bf16(operation(from_bf16(left.data), wide(right).data)), tl.bfloat16)
        return binary(self, left, right, operation)

    def unary_op(self: Any, x: Any, operation: Any) -> Any:
        if x.dtype.scalar == tl.bfloat16:
            return handle(to_bf16(operation(from_bf16(x.data))), tl.bfloat16)
        return unary(self, x, operation)

    def cast_impl(self: Any, x: Any, target: Any) -> Any:
        if target.scalar == tl.bfloat16 and x.dtype.scalar != tl.bfloat16:
            return handle(to_bf16(x.data.astype(np.float32)), tl.bfloat16)
        return cast(self, wide(x), target) if target.scalar != tl.bfloat16 else x

    def fp_to_fp(self: Any, x: Any, target: Any, rounding: Any) -> Any:
        return (
            cast_impl(self, x, target)
            if tl.bfloat16 in (target.scalar, x.dtype.scalar)
            else fp_to_fp.upstream(self, x, target, rounding)
        )

    fp_to_fp.upstream = builder.create_fp_to_fp  # type: ignore[attr-defined]
    builder.binary_op, builder.unary_op, builder.cast_impl, builder.create_fp_to_fp = (
        binary_op,
        unary_op,
        cast_impl,
        fp_to_fp,
    )

    def arange(self: Any, start: int, end: int, *, ret_ty: Any = None) -> Any:
        return self.make_tensor(
            self.builder.create_make_range(None, start, end), ret_ty or tl.block_type(tl.int32, [end - start])
        )

    interpreter.TritonSemantic.arange = arange
    for name in ("triton._utils", "triton.language.core"):
        sys.modules[name].is_power_of_two = lambda n: True  # type: ignore[attr-defined]

    # Upstream redirects the language to the interpreter for every call of every function and takes it back afterwards.
    # Here nothing else ever uses the language, so it stays redirected: a step of V4.1 takes half the time.
    redirect, redirected = interpreter._patch_lang, {}

    def patch_once(fn: Any) -> Any:
        languages = tuple(id(v) for v in fn.__globals__.values() if v is tl or v is sys.modules["triton.language.core"])
        if languages not in redirected:
            redirected[languages] = redirect(fn)
        return _Permanent

    interpreter._patch_lang = patch_once
    # Asserting every integer sum against overflow doubles the rest; the sizes of these tests cannot overflow.
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )

    executor = interpreter.GridExecutor
    executor._init_args_hst = lambda self, positional, named: (positional, named)
    executor._restore_args_dev = lambda self, *arguments: None
    executor.__call__ = _launch(executor.__call__)


def _vectorised(self: Any, *positional: Any, **named: Any) -> Any:
    """One of our kernels by its operator's reference."""
    from .vectorised import KERNELS

    def host(value: Any) -> Any:
        return memory.host(value) if isinstance(value, torch.Tensor) else value

    return KERNELS[self.fn.__name__](*map(host, positional), **named)


def _launch(interpreted: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *positional: Any, **named: Any) -> Any:
        ours = self.fn.__module__.startswith("vllm_ascend_dsv41.") and not self.fn.__name__.startswith("lookup")
        run = _vectorised if ours and os.environ.get("EMULATED_TRITON") == "vectorised" else interpreted
        grid = self.grid(named) if callable(self.grid) else self.grid
        if math.prod(grid) > LARGEST_GRID:
            raise ValueError(f"{self.fn.__name__}: a grid of {grid}; a device takes fewer than 65,536 programs")
        if WAITING.value:
            graphs.check_launch(torch.npu.current_stream().npu_stream)
        if recorder.active():
            recorder.note("triton", self.fn.__name__, positional, named)
        positional, named = tuple(map(_kept, positional)), {k: _kept(v) for k, v in named.items()}
        tensors = [memory.host(v) for v in (*positional, *named.values()) if isinstance(v, torch.Tensor)]
        if graphs.record(self.fn.__name__, lambda: run(self, *positional, **named), *tensors):
            return None
        with torch.device("cpu"):  # a program may have made the NPU the default for new tensors
            return run(self, *positional, **named)

    return call
