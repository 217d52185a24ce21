"""Pictures on the emulated NPU: the tower through vllm-ascend's layers, embeddings and ids into captured steps."""

import pytest
from measures import INT8, Distance

from emulated_npu.ours.trace import PLUGINS
from emulated_npu.peer.many_requests import images

pytestmark = [pytest.mark.long, pytest.mark.emulated_npu(fresh=True)]
SIZES = {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0, "cudagraph_capture_sizes": [1, 2]}


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", PLUGINS)


@pytest.mark.parametrize(("weights", "name", "budget"), [("bf16", "image_1", 1), ("w8a8", "image_2", 19)])
def test_golden_pictures(converted, weights, name, budget):
    """Prefill in steps that cut spans, and in steps of one token, which are replayed graphs as decode steps are."""
    result = images(
        str(converted("a", weights)),
        name=name,
        quantization="ascend",
        graphs=True,
        compilation_config=SIZES,
        max_num_batched_tokens=budget,
        max_num_seqs=min(budget, 2),
    )
    assert result["pictures"] == int(name[-1])
    for part in ("prefill", "decode"):
        assert INT8.holds(Distance(*result[part], max_abs=0.0)), result
    if weights == "bf16":  # 0.006; pictures that are embedded as ids in the graphs give 0.051
        assert result["decode"][0] < 0.02, result
