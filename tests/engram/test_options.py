"""--engram-config and --additional-config, dsv41.engram."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_ascend_dsv41.engram import EngramOptionError, EngramOptions


def own(**values):
    return {"dsv41": {"engram": values}}


def test_defaults():
    assert EngramOptions.of(None, None) == EngramOptions()
    assert EngramOptions.of(None, {"enable_kvpp": False}) == EngramOptions()
    assert EngramOptions() == EngramOptions(True, False, False, False, 1024, "auto", False, 2)


def test_both_sources():
    given = SimpleNamespace(cpu_offload=True, embedding_across_dp=False, dp_shared_memory=True)
    options = EngramOptions.of(given, own(chunk_mib=64, numa="0,2", prefetch=True, load_threads=8))
    assert options == EngramOptions(True, False, True, False, 64, "0,2", True, 8)
    assert options.nodes == [0, 2]
    assert EngramOptions.of(None, own(numa=1)).nodes == [1]
    later = SimpleNamespace(cpu_offload=True, embedding_across_dp=False, dp_shared_memory=False, use_thp=True)
    assert EngramOptions.of(later, {}).use_thp  # vLLM's own field from 0.32 on


@pytest.mark.parametrize(
    ("engram", "additional", "text"),
    [
        ({}, own(chunks=1), "unknown option 'chunks'; there are chunk_mib, numa"),
        ({}, own(cpu_offload=False), "unknown option 'cpu_offload'; it belongs to --engram-config"),
        ({}, own(prefetch=1), "prefetch is 1, expected bool"),
        ({}, own(chunk_mib=True), "chunk_mib is True, expected int"),
        ({}, own(chunk_mib=3), "chunk_mib is 3, expected a multiple of 2"),
        ({}, own(chunk_mib=0), "chunk_mib is 0, expected at least 1"),
        ({}, own(load_threads=-1), "load_threads is -1"),
        ({}, own(numa="near"), "numa is 'near', expected auto, interleave, off or node numbers"),
        ({}, {"dsv41": {"engram": [1]}}, r"\[1\] is not an object"),
        ({}, {"dsv41": {"engarm": {}}}, r"dsv41 is \{'engarm': \{\}\}, expected an object with \"engram\""),
        ({}, {"dsv41": True}, "dsv41 is True"),
        ({}, own(load_threads=1000), "load_threads is 1000, expected at most 64"),
        ({"dp_shared_memory": True, "embedding_across_dp": True}, {}, "exclude each other"),
        ({"dp_shared_memory": True, "cpu_offload": False}, {}, "dp_shared_memory is about host memory"),
        ({"dp_shared_memory": True}, own(use_thp=True), "use_thp is for a private copy"),
        ({"cpu_offload": False}, own(use_thp=True), "cpu_offload is false"),
    ],
)
def test_refusals(engram, additional, text):
    given = SimpleNamespace(**{"cpu_offload": True, "embedding_across_dp": False, "dp_shared_memory": False, **engram})
    with pytest.raises(EngramOptionError, match=text):
        EngramOptions.of(given, additional)
