"""Look-ups that begin before they are needed."""

from __future__ import annotations

import threading

import pytest
import torch

from vllm_ascend_dsv41.engram import Prefetcher

CPU = torch.device("cpu")


def test_off_nothing_happens_before_it_is_needed():
    done = []
    pending = Prefetcher(CPU, on=False).start(lambda: done.append(threading.get_ident()) or torch.ones(1))
    assert done == []
    assert torch.equal(pending.wait(), torch.ones(1))
    assert done == [threading.get_ident()]


def test_on_it_runs_meanwhile_in_another_thread():
    begun, go = threading.Event(), threading.Event()

    def look_up():
        begun.set()
        assert go.wait(10)
        return torch.full((1,), float(threading.get_ident() % 97))

    pending = Prefetcher(CPU, on=True).start(look_up)
    assert begun.wait(10)
    go.set()
    assert int(pending.wait()) != threading.get_ident() % 97


def test_several_in_order_and_failures_where_they_are_waited_for():
    prefetcher = Prefetcher(CPU, on=True)
    pending = [prefetcher.start(lambda n=n: torch.full((2,), float(10 // n))) for n in (5, 0, 2)]
    assert torch.equal(pending[2].wait(), torch.full((2,), 5.0))
    assert torch.equal(pending[0].wait(), torch.full((2,), 2.0))
    with pytest.raises(ZeroDivisionError):
        pending[1].wait()
