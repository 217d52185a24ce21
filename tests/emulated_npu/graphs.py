"""Captured graphs: a tape of closures over device memory, replayed in the order of capture.

vllm-ascend's full graphs contain task groups whose parameters are updated after the launch: each group is preceded by
a wait for an external event, which the updating stream records when the group is up to date. A replay therefore stops
at such a wait and goes on when the event is recorded. Until then the host must neither wait for the device nor launch
more work on that stream: on an NPU the first would hang, the second would run later; here both are errors.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from . import memory
from .library import LIBRARY, WAITING, EmulationError, Hook, recent_error, set_error

Kernel = Callable[[], object]
FAILED = 507000  # ACL_ERROR_RT_INTERNAL_ERROR


@dataclass
class Node:
    """One kernel and the allocations it touches, which are checked before each replay."""

    name: str
    run: Kernel
    segments: tuple[memory.Segment, ...] = ()


@dataclass
class Group:
    nodes: list[Node] = field(default_factory=list)


@dataclass
class Wait:
    """For an external event, or (torch_npu 2.13) for a word of device memory."""

    ready: Callable[[], bool]


@dataclass
class Reset:
    event: int


Step = Node | Group | Wait | Reset


@dataclass(eq=False)
class Replay:
    steps: Iterator[Step]
    stream: int
    waits: Wait | None = None


class _Thread(threading.local):
    capture: list[Step] | None = None
    group: Group | None = None
    update: Group | None = None


state = _Thread()
graphs: dict[int, list[Step]] = {}
groups: dict[int, Group] = {}
waiting: list[Replay] = []
counts: Counter[str] = Counter()


def capturing() -> bool:
    return state.capture is not None


def record(name: str, run: Kernel, *tensors: torch.Tensor) -> bool:
    """Notes a kernel. Returns True when it must not run now, because it updates a group of a captured graph.

    tensors: CPU views of the device memory that the kernel uses.
    """
    if state.update is None and state.capture is None:
        return False
    storages = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
    node = Node(name, run, tuple(s for s in memory._segments if s.storage.data_ptr() in storages))
    if state.update is not None:
        state.update.nodes.append(node)
        return True
    if state.group is not None:
        state.group.nodes.append(node)
    elif state.capture is not None:
        state.capture.append(node)
    return False


def check_launch(stream: int) -> None:
    """Called before work starts while a replay waits."""
    if state.update is None and any(r.stream == stream for r in waiting):
        raise EmulationError(
            "work was launched behind a replayed graph that waits for the update of its task groups (replay "
            "before update)"
        )


def check_host_read() -> None:
    """Called before the host reads device memory."""
    if capturing():
        raise EmulationError("host read of device memory during graph capture")
    if waiting:
        raise EmulationError(
            "the host waits for a replayed graph whose task groups nobody has updated (replay before update)"
        )


def _run(node: Node) -> None:
    memory.refresh()
    if any(not s.live for s in node.segments):
        raise EmulationError(
            f"use after free: {node.name} in a replayed graph uses device memory that was freed after its capture"
        )
    node.run()
    counts["nodes"] += 1


def _advance(replay: Replay) -> None:
    for step in replay.steps:
        if isinstance(step, Wait):
            if not step.ready():
                replay.waits = step
                waiting.append(replay)
                WAITING.value = len(waiting)
                return
        elif isinstance(step, Reset):
            LIBRARY.fakecann_event_reset(step.event)
        elif isinstance(step, Group):
            for node in step.nodes:
                _run(node)
        else:
            _run(step)


def _task(address: int) -> Kernel:
    def run() -> None:
        if LIBRARY.fakecann_run_task(address):
            raise EmulationError(recent_error())

    return run


def _handle(hook: Hook, first: int, second: int) -> None:
    if hook is Hook.CAPTURE_BEGIN:
        state.capture = []
        counts["captures"] += 1
    elif hook is Hook.CAPTURE_END:
        assert state.capture is not None
        graphs[first], state.capture, state.group = state.capture, None, None
    elif hook is Hook.EXECUTE:
        check_launch(second)
        counts["replays"] += 1
        _advance(Replay(iter(graphs[first]), second))
    elif hook is Hook.DESTROY:
        graphs.pop(first, None)
    elif hook is Hook.GROUP_BEGIN:
        assert state.capture is not None
        state.group = Group()
        state.capture.append(state.group)
    elif hook is Hook.GROUP_END:
        assert state.group is not None
        groups[first], state.group = state.group, None
    elif hook is Hook.UPDATE_BEGIN:
        if first not in groups:
            raise EmulationError("update of an unknown task group")
        state.update = groups[first]
        state.update.nodes.clear()
        counts["updates"] += 1
    elif hook is Hook.UPDATE_END:
        state.update = None
    elif hook is Hook.EVENT_WAIT:
        assert state.capture is not None
        state.capture.append(Wait(lambda: bool(LIBRARY.fakecann_event_recorded(first))))
    elif hook is Hook.EVENT_RESET:
        assert state.capture is not None
        state.capture.append(Reset(first))
    elif hook is Hook.VALUE_WAIT:
        assert state.capture is not None
        word = memory.view(first, torch.int64, (1,), (1,))
        state.capture.append(Wait(lambda: int(word) >= second))
    elif hook is Hook.RECORD:
        ready = [r for r in waiting if r.waits is not None and r.waits.ready()]
        waiting[:] = [r for r in waiting if r not in ready]
        WAITING.value = len(waiting)
        for replay in ready:
            _advance(replay)
    elif hook is Hook.TASK:
        record("a copy or collective", _task(first))
    elif hook is Hook.LAUNCH:
        check_launch(first)
    elif hook is Hook.SYNCHRONISE:
        check_host_read()


def graph_hook(hook: int, first: int, second: int) -> int:
    try:
        _handle(Hook(hook), first, second)
    except EmulationError as error:
        set_error(str(error))
        return FAILED
    except Exception:
        traceback.print_exc()
        set_error(traceback.format_exc(limit=-3))
        return FAILED
    return 0
