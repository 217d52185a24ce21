"""The reference against DeepSeek's own inference code, whole model."""

from __future__ import annotations

import pytest
import torch
from measures import BF16, FP32, MX, distance, rms

from reference.replay import Replay, replay, selected
from vllm_ascend_dsv41.reference import Grid

VARIANTS = {
    "exact-fp32": (Grid.EXACT, torch.float32, FP32),
    "exact-weights": (Grid.EXACT, torch.bfloat16, BF16),
    "official": (Grid.MX, torch.bfloat16, MX),
}
TEXTS = [("a", n) for n in (1, 2, 5, 17, 40, 130, 300)] + [("c", n) for n in (17, 40, 130)]


@pytest.fixture(scope="module")
def replayed(official, reference, golden):
    made: dict[tuple[str, int, str], Replay] = {}

    def make(preset: str, length: int, variant: str) -> tuple[dict, Replay]:
        case = golden(preset, f"text_{length:04d}.{variant}")
        key = (preset, length, variant)
        if key not in made:
            grid, dtype, _ = VARIANTS[variant]
            made[key] = replay(reference(official(preset), grid, dtype), case)
        return case, made[key]

    return make


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("preset", "length"), TEXTS)
def test_logits_of_prefill_and_decode(replayed, preset, length, variant):
    case, own = replayed(preset, length, variant)
    found = torch.cat((own.prefill_logits, own.decode_logits))
    wanted = torch.cat((case["prefill_logits"], case["decode_logits"]))
    d = distance(found, wanted)
    assert VARIANTS[variant][2].holds(d), d


@pytest.mark.parametrize(("preset", "length"), TEXTS)
def test_draft(replayed, preset, length):
    case, own = replayed(preset, length, "exact-fp32")
    assert torch.equal(own.decode_logits.argmax(-1), case["decode_argmax"])
    assert torch.equal(own.spec_output_ids, case["spec_output_ids"])
    assert rms(own.spec_logits[case["spec_logits_steps"]], case["spec_logits"]) < 1e-5
    assert rms(own.spec_confidence, case["spec_confidence"]) < 1e-5
    assert rms(own.decode_main_hidden, case["decode_main_hidden"]) < 1e-5
    name = "prefill_main_hidden" if "prefill_main_hidden" in case else "prefill_main_hidden_tail"
    assert rms(own.prefill_main_hidden[-len(case[name]) :], case[name]) < 1e-5


@pytest.mark.parametrize("variant", ["exact-weights", "official"])
@pytest.mark.parametrize(("preset", "length"), TEXTS)
def test_draft_in_reduced_precision(replayed, preset, length, variant):
    """Position j depends on the tokens drafted before it: compared while they agree (golden/README.md)."""
    case, own = replayed(preset, length, variant)
    agree = (own.spec_output_ids == case["spec_output_ids"]).cumprod(1).bool()
    steps = case["spec_logits_steps"]
    compared = agree[steps, :-1]
    assert compared[:, 0].all()  # the first position depends on nothing drafted
    # five rows or so: one route that falls the other way weighs more than among all rows of a prompt
    assert rms(own.spec_logits[steps][compared], case["spec_logits"][compared]) < 2 * VARIANTS[variant][2].rms


@pytest.mark.parametrize(("preset", "length"), [("a", 17), ("c", 17), ("c", 40)])
def test_streams_of_every_layer(replayed, preset, length):
    case, own = replayed(preset, length, "exact-fp32")
    compared = 0
    for name, wanted in case.items():
        found = own.prefill_taps.get(name)
        if found is None or not name.startswith("layer"):
            continue
        compared += 1
        if wanted.is_floating_point():
            assert rms(found, wanted) < 1e-5, name
            assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max())), name
        else:
            assert torch.equal(found, wanted.to(found.dtype)), name
    assert compared >= 2 * 8  # at least streams and coefficients of every layer


@pytest.mark.parametrize(("variant", "bound"), [("exact-weights", 0.01), ("official", 0.03)])
def test_first_stream_in_reduced_precision(replayed, variant, bound):
    case, own = replayed("a", 17, variant)
    assert rms(own.prefill_taps["layer0.stream"], case["layer0.stream"]) < bound


def test_routing(replayed):
    """Recorded for one prompt length of set c."""
    case, own = replayed("c", 40, "exact-fp32")
    layers = [name for name in case if name.endswith(".gate_indices")]
    assert layers
    for name in layers:
        prefix = name.replace("layer", "layers.").replace(".gate_indices", ".ffn.gate_indices")
        assert torch.equal(own.prefill_taps[prefix], case[name].long()), name


@pytest.mark.parametrize(("preset", "length"), [("a", 130)])
def test_selections_and_candidates(replayed, preset, length):
    case, own = replayed(preset, length, "exact-fp32")
    layers = [int(name[5:].split(".")[0]) for name in case if name.endswith(".scores")]
    assert layers
    for layer in layers:
        found = own.prefill_taps[f"index{layer}.selected"]
        assert torch.equal(found, selected(case[f"index{layer}.topk"], found.shape[1]))
        scores, wanted = own.prefill_taps[f"index{layer}.scores"], case[f"index{layer}.scores"]
        finite = torch.isfinite(scores) & torch.isfinite(wanted)
        assert rms(scores[finite], wanted[finite]) < 1e-5
        if f"index{layer}.candidates" in case:
            visible = torch.arange(found.shape[1]) <= torch.arange(length)[:, None]  # the official mask covers blocks
            wanted = case[f"index{layer}.candidates"] & visible
            assert torch.equal(own.prefill_taps[f"index{layer}.candidates"] & visible, wanted)


@pytest.mark.parametrize("preset", ["a"])
def test_selections_of_decode_steps(replayed, preset):
    case, own = replayed(preset, 130, "exact-fp32")
    layers = [name.split(".")[0].removeprefix("decode_index") for name in case if name.startswith("decode_index")]
    assert layers
    for layer in layers:
        topk = case[f"decode_index{layer}.topk"]
        for step, taps in enumerate(own.decode_taps):
            found = taps[f"index{layer}.selected"]
            assert torch.equal(found, selected(topk[step, None], found.shape[1]))


@pytest.mark.parametrize("length", [5, 130])
def test_prefill_equals_decode(official, reference, golden, length):
    """Whatever the split into calls, the logits are the same: ratio-2 tails, windows and n-grams included."""
    from vllm_ascend_dsv41.reference import State

    model = reference(official("a"))
    case = golden("a", f"text_{length:04d}.exact-fp32")
    tokens = torch.cat((case["input_ids"], case["decode_tokens"]))
    whole = model(tokens, State()).logits
    small = 1 if length < 100 else 5
    for sizes in ([small] * len(tokens), [3] * (len(tokens) // 3 + 1), [length, len(tokens)]):
        state, parts, at = State(), [], 0
        for size in sizes:
            if at < len(tokens):
                parts.append(model(tokens[at : at + size], state).logits)
                at += size
        assert rms(torch.cat(parts), whole) < 2e-6


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("number", [1, 2])
def test_images(official, reference, golden, number, variant):
    grid, dtype, tolerance = VARIANTS[variant]
    model = reference(official("a"), grid, dtype)
    case, inputs = golden("a", f"image_{number}.{variant}"), golden("a", f"image_{number}.official")
    pictures, k = [], 0
    while f"image{k}.patches" in inputs:
        rows, columns = inputs[f"image{k}.vit_grid"].tolist()
        features = model.vision.tower(inputs[f"image{k}.patches"].to(dtype), (rows, columns))
        pictures.append(model.vision.align(features, (rows, columns)))
        bound = 1e-5 if dtype is torch.float32 else 0.02
        assert rms(features, case[f"image{k}.vit_out"]) < bound
        assert rms(pictures[-1], case[f"image{k}.aligner_out"]) < bound
        k += 1
    assert k == number
    embeddings = model.merge_images(case["input_ids"], case["token_types"], pictures)
    assert rms(embeddings, case["merged_embeddings"]) < (1e-5 if dtype is torch.float32 else 0.02)
    own = replay(model, case, embeddings)
    found = torch.cat((own.prefill_logits, own.decode_logits))
    d = distance(found, torch.cat((case["prefill_logits"], case["decode_logits"])))
    assert tolerance.holds(d), d
    if variant == "exact-fp32":
        assert torch.equal(own.spec_output_ids, case["spec_output_ids"])
    if variant == "official":
        text = case["token_types"] < 0
        for position, layer in enumerate(model.config.engram_layer_ids):
            rows = own.prefill_taps[f"layer{layer}.engram_hash"]
            assert torch.equal(rows[text], case["engram_hash"][text][:, position])
