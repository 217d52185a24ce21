"""The fake CANN as Python sees it: one shared library, loaded already by torch_npu under CANN's own names."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint64

LIBRARY = ctypes.CDLL("libascendcl.so")

GraphHook = ctypes.CFUNCTYPE(c_int32, c_int32, c_uint64, c_uint64)
OperatorHook = ctypes.CFUNCTYPE(c_int32, c_char_p, c_int32, POINTER(c_uint64), POINTER(c_double), POINTER(c_uint64))

LIBRARY.fakecann_calls.restype = c_uint64
LIBRARY.fakecann_live_segments.restype = c_uint64
LIBRARY.fakecann_translate.restype = c_int64
LIBRARY.fakecann_translate.argtypes = [ctypes.c_void_p, ctypes.c_void_p, c_size_t, c_size_t, c_int32]
LIBRARY.fakecann_segment.argtypes = [c_uint64, *[POINTER(c_uint64)] * 3, *[POINTER(c_int32)] * 2]
LIBRARY.fakecann_is_live.argtypes = [c_uint64]
LIBRARY.fakecann_touch.argtypes = [c_uint64]
LIBRARY.fakecann_event_recorded.argtypes = [c_uint64]
LIBRARY.fakecann_event_reset.argtypes = [c_uint64]
LIBRARY.fakecann_run_task.argtypes = [c_uint64]
LIBRARY.fakecann_inject.argtypes = [c_char_p, c_uint64, c_int32]
LIBRARY.aclGetRecentErrMsg.restype = c_char_p
#: How many replayed graphs wait for an event; C asks before it starts work.
WAITING = c_int32.in_dll(LIBRARY, "fakecann_waiting")
#: How many allocations were freed so far.
FREED = c_int64.in_dll(LIBRARY, "fakecann_freed")


class Hook(enum.IntEnum):
    """As `Hook` in cann/cann.h."""

    CAPTURE_BEGIN = 0
    CAPTURE_END = 1
    EXECUTE = 2
    DESTROY = 3
    GROUP_BEGIN = 4
    GROUP_END = 5
    UPDATE_BEGIN = 6
    UPDATE_END = 7
    EVENT_WAIT = 8
    EVENT_RESET = 9
    VALUE_WAIT = 10
    RECORD = 11
    TASK = 12
    LAUNCH = 13
    SYNCHRONISE = 14


class EmulationError(RuntimeError):
    """The program did something that a real NPU would refuse, or that the emulated one does not list."""


def recent_error() -> str:
    return LIBRARY.aclGetRecentErrMsg().decode(errors="replace")


def set_error(text: str) -> None:
    LIBRARY.fakecann_set_error(text.encode()[:1000])


def calls(name: str) -> int:
    """How often this process has called a function of CANN."""
    return int(LIBRARY.fakecann_calls(name.encode()))


def inject(name: str, code: int, call: int = 1) -> None:
    """The `call`-th call of the function from now on returns `code` instead of doing anything."""
    LIBRARY.fakecann_inject(name.encode(), call, code)


def clear_injections() -> None:
    LIBRARY.fakecann_clear_injections()


_kept: list[object] = []


def exchange(communicator: str, tag: int, data: bytes) -> list[bytes]:
    """What each rank of a communicator sends, in the order of ranks. Blocks until all are there."""
    sizes, buffers = (c_uint64 * 64)(), (ctypes.c_void_p * 64)()
    ranks = LIBRARY.fakecann_exchange(communicator.encode(), c_uint64(tag), data, c_uint64(len(data)), sizes, buffers)
    if ranks < 0:
        raise EmulationError(recent_error())
    received = [ctypes.string_at(buffers[i] or 0, sizes[i]) for i in range(ranks)]
    for i in range(ranks):
        LIBRARY.fakecann_free(ctypes.c_void_p(buffers[i]))
    return received


def set_hooks(graph: Callable[[int, int, int], int], operator: Callable[..., int]) -> None:
    _kept[:] = [GraphHook(graph), OperatorHook(operator)]  # ctypes does not keep callbacks alive
    LIBRARY.fakecann_set_graph_hook(_kept[0])
    LIBRARY.fakecann_set_operator_hook(_kept[1])
