"""A rotated checkpoint in vLLM: the Engram gates undo the rotation."""

from __future__ import annotations

from measures import distance

from vllm_ascend_dsv41.reference import State


def test_same_logits_as_the_reference(engine, converted, reference, golden):
    tokens = golden("a", "text_0040.exact-fp32")["input_ids"]
    result = engine("a", "bf16-quarot").run([tokens.tolist()], 1)[0]
    wanted = reference(converted("a", "bf16-quarot"))(tokens, State()).logits
    d = distance(result.matrix()[: len(tokens)], wanted)
    assert d.rms < 1e-4, d


def test_without_the_rotation_at_the_gates_it_shows(engine, converted, reference, golden):
    """The test above can fail."""
    tokens = golden("a", "text_0040.exact-fp32")["input_ids"]
    model = reference(converted("a", "bf16-quarot"))
    right = model(tokens, State()).logits
    gates = [block.engram for block in model.layers if block.engram is not None]
    rotation, gates[0].rotation = gates[0].rotation, None
    wrong = model(tokens, State()).logits
    gates[0].rotation = rotation
    assert distance(wrong, right).rms > 1e-3
