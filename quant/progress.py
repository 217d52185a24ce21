"""How far a conversion is: a bar on a terminal, one JSON object a line for programs, nothing otherwise."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Protocol

from tqdm import tqdm


class Progress(Protocol):
    """What ``convert`` tells. Sizes in bytes of output."""

    def begin(self, total: int, done: int) -> None:
        """Work starts; ``done`` of ``total`` were there already."""

    def advance(self, size: int, tensor: str) -> None:
        """Another step is written; ``tensor``: the last one in it."""

    def end(self) -> None:
        """Everything is written, or the work was given up."""


class Silent:
    """Tells nothing."""

    def begin(self, total: int, done: int) -> None: ...

    def advance(self, size: int, tensor: str) -> None: ...

    def end(self) -> None: ...


class Bar:
    """Bytes, rate, time left and current tensor, on standard error."""

    def begin(self, total: int, done: int) -> None:
        self._bar = tqdm(total=total, initial=done, unit="B", unit_scale=True, unit_divisor=1024, desc="quantize")

    def advance(self, size: int, tensor: str) -> None:
        self._bar.set_postfix_str(tensor, refresh=False)
        self._bar.update(size)

    def end(self) -> None:
        self._bar.close()


class Events:
    """JSON objects on standard output: ``begin``, ``progress`` at most once a second, then ``written``, or
    ``stopped`` if it was given up."""

    def begin(self, total: int, done: int) -> None:
        self._total, self._done, self._first, self._start, self._told = total, done, done, time.monotonic(), 0.0
        self._tell(event="begin", total=total, done=done)

    def advance(self, size: int, tensor: str) -> None:
        self._done += size
        now = time.monotonic()
        if now - self._told >= 1.0:
            self._told = now
            rate = (self._done - self._first) / max(now - self._start, 1e-9)
            left = (self._total - self._done) / max(rate, 1e-9)
            self._tell(
                event="progress",
                done=self._done,
                total=self._total,
                bytes_per_second=rate,
                seconds_left=left,
                tensor=tensor,
            )

    def end(self) -> None:
        event = "written" if self._done == self._total else "stopped"
        self._tell(event=event, done=self._done, total=self._total, seconds=time.monotonic() - self._start)

    @staticmethod
    def _tell(**values: Any) -> None:
        say(json.dumps(values))


def say(line: str) -> None:
    """A line on standard output; if nobody listens any more, that is no reason to give a conversion up."""
    try:
        print(line, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains when it ends


def on_terminal() -> Progress:
    """A bar where somebody may be looking."""
    return Bar() if sys.stderr is not None and sys.stderr.isatty() else Silent()
