"""The model in vLLM against DeepSeek's own outputs, in float32."""

from __future__ import annotations

import pytest
import torch
from measures import FP32, distance

TEXTS = [("a", n) for n in (1, 2, 5, 17, 40, 130, 300)] + [("c", n) for n in (17, 40, 130)]


@pytest.mark.parametrize(("preset", "length"), TEXTS)
def test_prefill_and_decode(engine, golden, preset, length):
    """The prompt in one step, then the recorded tokens in steps of one, as a decode does."""
    case = golden(preset, f"text_{length:04d}.exact-fp32")
    served = engine(preset, "bf16")
    tokens = case["input_ids"].tolist() + case["decode_tokens"].tolist()
    name = served.add(tokens, 1)
    served.budget(length)
    served.step()
    served.budget(1)
    served.finish()
    result = served.results.pop(name)
    assert all(len(rows) == 1 for rows in result.logits.values())
    wanted = torch.cat((case["prefill_logits"], case["decode_logits"]))
    d = distance(result.matrix(), wanted)
    assert FP32.holds(d), d


@pytest.mark.parametrize(("preset", "length"), [("a", 40), ("c", 40)])
def test_greedy_tokens(engine, golden, preset, length):
    """Sampled by vLLM; compared while the recorded run, which follows another variant, goes the same way."""
    case = golden(preset, f"text_{length:04d}.exact-fp32")
    result = engine(preset, "bf16").run([case["input_ids"].tolist()], len(case["decode_tokens"]))[0]
    fed, best = case["decode_tokens"].tolist(), case["decode_argmax"].tolist()
    same = 0
    while same < len(fed) - 1 and result.tokens[same] == fed[same]:
        assert result.tokens[same + 1] == best[same]
        same += 1
    assert same >= 1
