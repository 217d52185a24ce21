"""Starting, watching and killing processes that share Engram tables."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

from vllm_ascend_dsv41.quant import Checkpoint

from .member import member

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["engram.member"])  # torch once, not once a process
SECONDS = 60.0


def _dev_shm() -> set[str]:
    """Named shared memory, but for that of Python's multiprocessing, which others on this machine may be using."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("psm_", "sem."))}


class Members:
    """``ranks`` processes with one copy. ``refusals``: by rank, which function's call the runtime refuses."""

    def __init__(
        self,
        ranks: int,
        folder: Path,
        checkpoint: Checkpoint,
        rows: dict[int, int],
        runtime: str = "",
        slow: bool = False,
        refusals: dict[int, tuple[str, int]] | None = None,
    ) -> None:
        self.pipes, self.processes = [], []
        self.dev_shm = _dev_shm()
        for rank in range(ranks):
            here, there = CONTEXT.Pipe()
            arguments = (
                there,
                rank,
                ranks,
                str(folder / "meeting"),
                checkpoint,
                rows,
                runtime,
                slow,
                (refusals or {}).get(rank),
            )
            process = CONTEXT.Process(target=member, args=arguments, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def wait(self, step: str, ranks: list[int] | None = None) -> list[Any]:
        """What these ranks (all) say when they reach the step."""
        return [self._next(rank, step) for rank in ranks or range(len(self.pipes))]

    def _next(self, rank: int, step: str) -> Any:
        deadline = time.monotonic() + SECONDS
        while self.pipes[rank].poll(max(0.0, deadline - time.monotonic())):
            found, result = self.pipes[rank].recv()
            if found == step:
                return result
            assert found in ("loading", "made", "loaded"), f"rank {rank}, waiting for {step}: {found}: {result}"
        raise AssertionError(f"rank {rank} did not reach {step!r} within {SECONDS:.0f} s")

    def tell(self, order: str, ranks: list[int] | None = None) -> None:
        for rank in ranks or range(len(self.pipes)):
            self.pipes[rank].send(order)

    def kill(self, rank: int) -> list[int]:
        """End a process without warning; returns the other ranks."""
        os.kill(self.processes[rank].pid or 0, signal.SIGKILL)
        self.processes[rank].join()
        return [other for other in range(len(self.pipes)) if other != rank]

    def ended(self) -> None:
        """All have ended by themselves, and nothing of theirs is left."""
        for process in self.processes:
            process.join(SECONDS)
            assert process.exitcode is not None, "a process went on"
        assert _dev_shm() <= self.dev_shm
