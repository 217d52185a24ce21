"""Worker processes that run steps, and end with their parent."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from .checkpoint import CheckpointError, Location
from .inventory import Weights
from .plan import Step
from .work import AGAIN, Worker

PR_SET_PDEATHSIG = 1
Job = tuple[Step, Mapping[str, Location]]
_worker: Worker | None = None


def _start(parent: int, source: Path, target: Path, weights: Weights) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    # without this a killed parent would leave workers that wait for ever
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    _worker = Worker(source, target, weights)


def _run(job: Job) -> Step:
    assert _worker is not None
    _worker.run(*job)
    return job[0]


def run_steps(jobs: Iterable[Job], workers: int, source: Path, target: Path, weights: Weights) -> Iterator[Step]:
    """Run all jobs; yields each step when its bytes are written. Raises CheckpointError.

    One worker means this process. On an error, and when the caller stops, steps that were begun are finished.
    """
    if workers == 1:
        worker = Worker(source, target, weights)
        try:
            for step, locations in jobs:
                worker.run(step, locations)
                yield step
        finally:
            worker.source.close()
        return
    remaining, running, started = iter(jobs), set[Future[Step]](), False
    with _one_thread_each():
        pool = ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), _start, (os.getpid(), source, target, weights)
        )
        try:
            while True:
                while len(running) < 2 * workers and (job := next(remaining, None)) is not None:
                    running.add(pool.submit(_run, job))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    step = future.result()
                    started = True
                    yield step
        except BrokenProcessPool as error:
            cause = "out of memory? then use fewer --workers" if started else "does the script have a main guard?"
            raise CheckpointError(f"a worker process was killed ({cause}), {AGAIN}") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Workers started meanwhile use one thread for matrix products."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
