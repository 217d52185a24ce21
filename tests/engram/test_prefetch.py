"""Look-ups that begin before they are needed."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from vllm_ascend_dsv41.engram import Prefetcher

CPU = torch.device("cpu")
IDS = torch.arange(3)


def test_off_nothing_happens_before_it_is_needed():
    done = []
    pending = Prefetcher(CPU, on=False).start(lambda ids: done.append(threading.get_ident()) or ids * 2, IDS)
    assert done == []
    assert torch.equal(pending.wait(), IDS * 2)
    assert done == [threading.get_ident()]


def test_on_it_runs_meanwhile_in_another_thread():
    begun, go, threads = threading.Event(), threading.Event(), []

    def look_up(ids):
        begun.set()
        threads.append(threading.get_ident())
        assert go.wait(10)
        return ids * 3

    prefetcher = Prefetcher(CPU, on=True)
    pending = prefetcher.start(look_up, IDS)
    assert begun.wait(10)
    go.set()
    assert torch.equal(pending.wait(), IDS * 3)
    assert threads != [threading.get_ident()]
    prefetcher.close()


def test_the_thread_may_run_on_any_processor_of_the_process():
    """vLLM pins the main thread, and the thread must not compute beside it on the same processor."""
    allowed, holding = os.sched_getaffinity(0), threading.Event()
    other = threading.Thread(target=holding.wait)
    other.start()  # a thread of the process that may run anywhere
    prefetcher = Prefetcher(CPU, on=True)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        found = prefetcher.start(lambda ids: torch.tensor(sorted(os.sched_getaffinity(0))), IDS).wait()
    finally:
        os.sched_setaffinity(0, allowed)
        holding.set()
        other.join()
    assert found.tolist() == sorted(allowed)
    prefetcher.close()


def test_several_in_order_and_failures_where_they_are_waited_for():
    prefetcher = Prefetcher(CPU, on=True)
    pending = [prefetcher.start(lambda ids, n=n: ids + 10 // n, IDS) for n in (5, 0, 2)]
    assert torch.equal(pending[2].wait(), IDS + 5)
    assert torch.equal(pending[0].wait(), IDS + 2)
    with pytest.raises(ZeroDivisionError):
        pending[1].wait()
    prefetcher.close()


def test_closing_waits_for_what_nobody_waited_for():
    done = threading.Event()
    prefetcher = Prefetcher(CPU, on=True)
    prefetcher.start(lambda ids: (threading.Event().wait(0.2), done.set(), ids)[2], IDS)
    prefetcher.close()
    assert done.is_set()
    prefetcher.close()
