"""The INT8 grid of the reference: near the exact logits, and built from exact integer products."""

from __future__ import annotations

import pytest
import torch
from measures import INT8, distance

from vllm_ascend_dsv41.reference import Grid, State
from vllm_ascend_dsv41.reference.numerics import round_int8


@pytest.mark.parametrize("length", [17, 130, 300])
@pytest.mark.parametrize("preset", ["a"])
def test_logits(converted, reference, golden, preset, length):
    case = golden(preset, f"text_{length:04d}.exact-fp32")
    model = reference(converted(preset, "w8a8"), Grid.W8A8, torch.bfloat16)
    tokens = torch.cat((case["input_ids"], case["decode_tokens"]))
    d = distance(model(tokens, State()).logits, torch.cat((case["prefill_logits"], case["decode_logits"])))
    assert INT8.holds(d), d


def test_bf16_conversion_is_exact(converted, official, reference, golden):
    """FP4 and FP8 times a power of two fit BF16: the same logits to the last bit of the arithmetic."""
    tokens = golden("a", "text_0130.exact-fp32")["input_ids"]
    ours = reference(converted("a", "bf16"))(tokens, State()).logits
    assert torch.equal(ours, reference(official("a"))(tokens, State()).logits)


def test_integer_product_is_exact(converted, reference):
    model = reference(converted("a", "w8a8"), Grid.W8A8, torch.float32)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    linear = model.layers[0].attn.wq_a
    codes, scale = round_int8(x)
    exact = codes.long() @ linear.codes.long().T
    wanted = exact.double() * scale.double() * linear.scale[:, 0].double()
    assert torch.allclose(model.arithmetic.product(x, linear).double(), wanted, rtol=1e-6, atol=0)
