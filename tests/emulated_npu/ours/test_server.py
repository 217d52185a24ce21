"""`dsv41 serve` on the emulated device: the server's own processes, over HTTP, started with graphs and drafts."""

import json
import re
import urllib.request

import pytest

from emulated_npu.ours.trace import PLUGINS
from vllm_ascend_dsv41.deploy.check import Service
from vllm_ascend_dsv41.deploy.demo import FLAGS, NEAR_TIE, SERVED_NAME, _requests, compare_with_reference
from vllm_ascend_dsv41.deploy.server import Server

pytestmark = [pytest.mark.long, pytest.mark.emulated_npu(fresh=True)]
OPTIONS = (
    *(flag for flag in FLAGS if flag != "--enforce-eager"),
    *("--max-num-seqs", "2", "--max-model-len", "1024", "--gpu-memory-utilization", "0.05"),
    *("--num-gpu-blocks-override", "128", "--limit-mm-per-prompt", '{"image": 0}'),
    *("--compilation-config", '{"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0, "cudagraph_capture_sizes": [6, 12]}'),
    *("--speculative-config", '{"method": "dspark", "num_speculative_tokens": 5}'),
)

ENVIRONMENT = {"VLLM_PLUGINS": PLUGINS, "VLLM_USE_V2_MODEL_RUNNER": "0"}


def test_requests_over_http(converted, tmp_path, monkeypatch):
    model = converted("a", "w8a8")
    monkeypatch.setattr("vllm_ascend_dsv41.deploy.demo.REQUEST", {**_short(), "model": SERVED_NAME})
    with Server(
        model, OPTIONS, tmp_path / "log", env={**ENVIRONMENT, "DSV41_STARTUP_REPORT": str(tmp_path / "ready.json")}
    ) as server:
        prompt, tokens = _requests(server)
        service = Service(server.url, "", 300)
        assert (
            service.stream(
                "Who are you?", max_completion_tokens=8, extra_body={"ignore_eos": True}
            ).usage.completion_tokens
            == 8
        )
        service.close()
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
            metrics = answer.read().decode()
    report = json.loads((tmp_path / "ready.json").read_text())
    assert report["graphs"] == {"mode": "FULL_DECODE_ONLY", "sizes": [6, 12]}
    assert report["draft"] == "DSpark, 5 tokens"
    assert "sparse_attention" in report["operators"]["npu"]
    assert report["cache"]["blocks"] == 128
    result = compare_with_reference(model, prompt, tokens)
    assert result.worst_gap <= NEAR_TIE
    assert result.equal >= 0.7 * result.total  # of 24: fewer than the demo's 256, so that one counts for more
    drafted = re.search(r"^vllm:spec_decode_num_draft_tokens_total\{.*\} (.*)$", metrics, re.MULTILINE)
    assert drafted is not None
    assert float(drafted[1]) > 0


def _short():
    return {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0, "max_completion_tokens": 24}
