"""Several requests of our model on the emulated NPU: chunks beside decodes, preemption, prefix hits, drawn drafts."""

import pytest
from measures import rms

from emulated_npu.ours.trace import PLUGINS
from emulated_npu.peer.engine import DSPARK, Engine
from emulated_npu.peer.many_requests import together
from emulated_npu.peer.measure import prompt_of

pytestmark = [pytest.mark.long, pytest.mark.emulated_npu(fresh=True)]
OURS = {"quantization": "ascend", "dtype": "float32"}


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", PLUGINS)


def test_chunks_beside_decodes_and_drafts(converted):
    """Each request gets the tokens that it gets alone, whatever shares its steps."""
    drafts = {"speculative_config": dict(DSPARK), "max_num_batched_tokens": 37}
    result = together(str(converted("a", "bf16-good")), "a", 8, **drafts, **OURS)
    assert all(result["equal"]), result


def test_preemption_with_drafts(converted):
    few = {"max_model_len": 160, "num_gpu_blocks_override": 44}
    drafts = {"speculative_config": dict(DSPARK)}
    result = together(str(converted("a", "bf16-good")), "a", 12, border=True, **few, **drafts, **OURS)
    assert result["preempted"] > 0
    assert all(result["equal"]), result


def test_prefix_hits(converted):
    """The second time the first block is there already, and nothing else differs."""
    own = Engine(str(converted("a", "bf16")), enable_prefix_caching=True, **OURS)
    prompt, tokens = prompt_of("a", 130)
    first, second = (own.run(prompt, tokens[:6], 6) for _ in range(2))
    assert (first.cached, second.cached) == (0, 128)
    rows = sorted(second.hidden)
    assert rows[0] == 128
    assert rms(second.rows(second.hidden, rows), first.rows(first.hidden, rows)) < 2e-6


def test_drawn_drafts_repeat_with_their_seed(converted):
    drafts = {**DSPARK, "draft_sample_method": "probabilistic"}
    own = Engine(str(converted("a", "bf16")), speculative_config=drafts, **OURS)
    prompt = prompt_of("a", 17)[0]
    hot = {"temperature": 2.0, "tokens": 5}
    drawn = [own.generate([prompt] * n, seed=7, **hot)[0] for n in (1, 2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != own.generate([prompt], seed=8, **hot)[0]
