"""A draft that is never accepted is reported: once in the log, and as a gauge."""

from __future__ import annotations

from types import SimpleNamespace

import prometheus_client
import pytest
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_ascend_dsv41.spec_decode import health
from vllm_ascend_dsv41.spec_decode.health import WINDOW, DraftHealth, DraftHealthLogger
from vllm_ascend_dsv41.spec_decode.options import PROPOSER


def watcher(name, model=PROPOSER):
    model_config = SimpleNamespace(served_model_name=name)
    speculative = None if model is None else SimpleNamespace(model=model)
    return DraftHealthLogger(SimpleNamespace(model_config=model_config, speculative_config=speculative), 3)


def observe(logger, drafts, accepted):
    stats = SpecDecodingStats.new(5)
    for i in range(drafts):
        stats.observe_draft(num_draft_tokens=5, num_accepted_tokens=1 if i < accepted else 0)
    logger.record(SchedulerStats(spec_decoding_stats=stats), None)


def gauge(name):
    return prometheus_client.REGISTRY.get_sample_value("dsv41:draft_stuck", {"model_name": name, "engine": "3"})


@pytest.fixture
def errors(monkeypatch):
    said = []
    monkeypatch.setattr(health.logger, "error", lambda text, *values: said.append(text % values))
    return said


def test_stuck(errors):
    logger = watcher("stuck")
    assert gauge("stuck") == 0
    for _ in range(9):
        observe(logger, WINDOW // 10, 0)
    assert (gauge("stuck"), errors) == (0, [])
    observe(logger, WINDOW // 10, 4)  # one in 250: prints as 1.00
    assert gauge("stuck") == 1
    assert "engine 3: the draft is stuck: mean acceptance length 1.00 over 1000 drafts" in errors[0]
    observe(logger, WINDOW, 0)
    assert len(errors) == 1  # once
    observe(logger, WINDOW, WINDOW // 2)
    assert gauge("stuck") == 0  # it recovered
    observe(logger, WINDOW, 0)
    assert (gauge("stuck"), len(errors)) == (1, 1)


def test_healthy(errors):
    logger = watcher("healthy")
    for _ in range(5):
        observe(logger, WINDOW, 6)
    assert (gauge("healthy"), errors) == (0, [])


@pytest.mark.parametrize("model", [None, "ngram"])
def test_other_servers_are_left_alone(model):
    logger = watcher("other", model)
    observe(logger, 2 * WINDOW, 0)
    logger.record(None, None)
    assert gauge("other") is None


def test_windows():
    watched = DraftHealth(window=10)
    assert watched.observe(9, 0) is None
    assert watched.observe(3, 6) == pytest.approx(1.5)
    assert watched.observe(10, 0) == 1.0
    assert watched.stuck
