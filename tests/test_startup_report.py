"""What a worker says when it is ready must not end it."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest

from vllm_ascend_dsv41.worker import report

FACTS = {
    "schema": 1,
    "model": "m",
    "parallel": {"data_rank": 1},
    "engram": [],
    "operators": {"cpu": ["route"]},
    "warnings": ["w"],
}
WORKER = SimpleNamespace(rank=0, vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(world_size=2)))


@pytest.fixture
def facts(monkeypatch):
    monkeypatch.setattr(report, "facts", lambda worker, warnings: {**FACTS, "warnings": warnings})


def test_written_for_each_replica(facts, tmp_path, monkeypatch):
    monkeypatch.setenv(report.FILE, str(tmp_path / "ready.json"))
    handler = report.collect_warnings()
    logging.getLogger("vllm.other").warning("slow: %d", 3)
    report.ready(WORKER, handler)
    assert json.loads((tmp_path / "ready.json.dp1").read_text())["warnings"] == ["slow: 3"]
    assert [path.name for path in tmp_path.iterdir()] == ["ready.json.dp1"]
    assert handler not in logging.getLogger("vllm").handlers


@pytest.mark.parametrize("path", ["/proc/version/x.json", "/", "x" * 300, "/nonexistent/x.json"])
def test_a_place_that_cannot_be_written(facts, path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(report.FILE, path)
    report.ready(WORKER, report.collect_warnings())
    assert list(tmp_path.iterdir()) == []


def test_facts_that_cannot_be_had(monkeypatch):
    report.ready(WORKER, report.collect_warnings())  # this worker has no model: said, and no more


def test_a_wrong_call_of_logging_elsewhere(monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    handler = report.collect_warnings()
    logging.getLogger("vllm.x").warning("%d files", "many")
    assert handler.texts == []
    assert report.collect_warnings() is not handler
    assert handler not in logging.getLogger("vllm").handlers
    logging.getLogger("vllm").removeHandler(logging.getLogger("vllm").handlers[-1])


def test_other_ranks_are_silent(monkeypatch):
    monkeypatch.setattr(report, "facts", lambda *_: pytest.fail("only the first rank reports"))
    report.ready(SimpleNamespace(rank=1, vllm_config=WORKER.vllm_config), report.collect_warnings())
