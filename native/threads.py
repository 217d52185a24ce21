"""Work of compiled functions spread over threads: ctypes lets go of the interpreter while C runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise


def processors() -> set[int]:
    """Processors that any thread of this process may run on. vLLM pins each OpenMP thread, the main one among them, to
    one of the processors of its rank, and a new thread inherits the mask of the thread that makes it."""
    allowed: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        try:
            allowed |= os.sched_getaffinity(int(thread))
        except ProcessLookupError:  # it ended meanwhile
            continue
    return allowed


def executor(threads: int) -> ThreadPoolExecutor:
    """Threads on the processors of this process, from whichever thread it is made."""
    allowed = processors()
    return ThreadPoolExecutor(threads, thread_name_prefix="dsv41", initializer=lambda: os.sched_setaffinity(0, allowed))


@cache
def pool(threads: int) -> ThreadPoolExecutor:
    """One that stays."""
    return executor(threads)


def spread(function: Callable[[int, int], object], count: int, threads: int) -> None:
    """Call function(begin, end) on ``threads`` near-equal parts of range(count). The first failure is raised, after all
    have ended."""
    threads = max(1, min(threads, count))
    if threads == 1:
        function(0, count)
        return
    borders: Sequence[int] = [count * i // threads for i in range(threads + 1)]
    jobs = [pool(threads - 1).submit(function, *part) for part in pairwise(borders[1:])]
    try:
        function(borders[0], borders[1])
    finally:
        errors = [job.exception() for job in jobs]
    for error in filter(None, errors):
        raise error


os.register_at_fork(after_in_child=pool.cache_clear)  # a child inherits the pools, but none of their threads
