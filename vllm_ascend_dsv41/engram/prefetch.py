"""Looking rows up while the layers before their use compute: rows depend on token ids alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from ..native.threads import executor

LookUp = Callable[[Tensor], Tensor]


class Pending(Protocol):
    """A look-up under way."""

    def wait(self) -> Tensor:
        """The rows; what is launched on the current stream from now on may read them. To be called once."""


class _Later:
    """Not begun: it takes no memory before it is needed."""

    def __init__(self, look_up: LookUp, ids: Tensor) -> None:
        self._look_up, self._ids = look_up, ids

    def wait(self) -> Tensor:
        return self._look_up(self._ids)


class _OnThread:
    def __init__(self, future: Future[Tensor]) -> None:
        self._future = future

    def wait(self) -> Tensor:
        return self._future.result()


class _OnStream:
    """``ids`` are kept: their memory, which belongs to the other stream, must not be reused before they are read."""

    def __init__(self, rows: Tensor, ids: Tensor, stream: torch.Stream) -> None:
        self._rows, self._ids, self._stream = rows, ids, stream

    def wait(self) -> Tensor:
        current = torch.accelerator.current_stream()
        current.wait_stream(self._stream)
        self._rows.record_stream(current)
        return self._rows


class Prefetcher:
    """Starts look-ups beside the computation: on a thread of the CPU, or on a second stream of an accelerator, which a
    captured graph takes in as a branch. Off, a look-up happens when it is waited for."""

    def __init__(self, device: torch.device, on: bool) -> None:
        self._device, self._on = device, on
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.Stream | None = None

    def start(self, look_up: LookUp, ids: Tensor) -> Pending:
        """Begin look_up(ids), after everything that the current stream was given before."""
        if not self._on:
            return _Later(look_up, ids)
        if self._device.type == "cpu":
            if self._thread is None:
                self._thread = executor(1)
            return _OnThread(self._thread.submit(look_up, ids))
        if self._stream is None:
            self._stream = torch.Stream(self._device)
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            return _OnStream(look_up(ids), ids, self._stream)

    def close(self) -> None:
        """Wait for look-ups that nobody waited for: the tables may go then."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
