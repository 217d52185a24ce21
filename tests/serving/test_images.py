"""Pictures in the vLLM engine against DeepSeek's own outputs and the reference, however their spans are computed."""

from __future__ import annotations

import math

import pytest
import torch
from measures import FP32, distance

from serving import pictures
from serving.conftest import GRIDS
from serving.pictures import ask, compose, picture, text
from vllm_ascend_dsv41.deploy.plan.weights import kind_of
from vllm_ascend_dsv41.quant import open_checkpoint
from vllm_ascend_dsv41.quant.inventory import inventory
from vllm_ascend_dsv41.upstream import LinearBase
from vllm_ascend_dsv41.worker.report import facts

EXACT = 1e-5
DRAFTS = {"method": "dspark", "num_speculative_tokens": 5, "enforce_eager": True}


@pytest.fixture
def case(golden):
    """``case(1)``: prompt and outputs of golden image_1."""

    def load(number: int):
        wanted, inputs = golden("a", f"image_{number}.exact-fp32"), golden("a", f"image_{number}.official")
        return pictures.of_golden(wanted, inputs), wanted, inputs

    return load


@pytest.mark.parametrize("number", [1, 2])
def test_patches(engine, case, number):
    """vLLM's processor gives DeepSeek's patches, grids and roles."""
    prompt, _, inputs = case(number)
    made = pictures.processing_info(engine("a", "bf16")).get_hf_processor()(images=prompt.pictures)
    names = [f"image{k}" for k in range(number)]
    assert torch.equal(made["patches"].float(), torch.cat([inputs[f"{n}.patches"].float() for n in names]))
    assert made["vit_grid"].tolist() == [inputs[f"{n}.vit_grid"].tolist() for n in names]
    assert torch.equal(made["types"], torch.cat([inputs[f"{n}.types"].long() for n in names]))


def served_logits(served, name):
    result = served.results.pop(name)
    assert all(len(rows) == 1 for rows in result.logits.values())
    return result.matrix(range(len(result.prompt)))


@pytest.mark.parametrize("number", [1, 2])
def test_golden_in_one_chunk(engine, case, number):
    """One picture, and two in one prompt; then the recorded tokens one by one."""
    prompt, wanted, _ = case(number)
    served = engine("a", "bf16")
    length, tokens = len(prompt.full), wanted["decode_tokens"].tolist()
    prompt.short, prompt.full = prompt.short + tokens, prompt.full + tokens
    name = ask(served, prompt)
    served.budget(length)
    served.step()
    served.budget(1)
    served.finish()
    d = distance(served_logits(served, name), torch.cat((wanted["prefill_logits"], wanted["decode_logits"])))
    assert FP32.holds(d), d


def test_golden_split_at_every_position_of_a_span(engine, case):
    """The first step ends before the span, behind each of its tokens, and behind it."""
    prompt, wanted, _ = case(1)
    served = engine("a", "bf16")
    span = prompt.span()
    for first in range(span.start, span.stop + 1):
        served.forget()
        name = ask(served, prompt)
        served.budget(first)
        served.step()
        served.budget(2048)
        served.finish()
        d = distance(served_logits(served, name), wanted["prefill_logits"])
        assert FP32.holds(d), (first, d)


@pytest.mark.parametrize("budget", [1, 7, 16])
def test_two_pictures_in_small_steps(engine, case, budget):
    """Steps that hold no picture, a part of one, and the end of one with the start of the next."""
    prompt, wanted, _ = case(2)
    served = engine("a", "bf16")
    name = ask(served, prompt)
    served.budget(budget)
    served.finish()
    d = distance(served_logits(served, name), wanted["prefill_logits"])
    assert FP32.holds(d), d


def test_prefix_hits(engine, converted, reference):
    """A second request takes whole blocks of text and picture from the cache; another picture in the same place, with
    the same token ids, does not."""
    served, model = engine("a", "bf16"), reference(converted("a", "bf16"))
    first, other = picture(90, 130, 1), picture(90, 130, 2)
    lead, tail = text(110, 3), text(40, 4)
    asked = [
        (compose(served, [lead, first, tail]), 0),
        (compose(served, [lead, first, tail]), 128),
        (compose(served, [lead, first, text(60, 5)]), 128),
        (compose(served, [lead, other, tail]), 0),
        (compose(served, [text(130, 6), first, tail]), 0),  # the encoder cache has this picture
        (compose(served, [text(130, 6), other, first, tail]), 128),
    ]
    assert len(asked[0][0].full) > 128 > asked[0][0].span().start
    for prompt, cached in asked:
        name = ask(served, prompt, 4)
        served.finish()
        result = served.results.pop(name)
        assert result.cached == cached
        complete = compose(served, _parts(prompt), result.tokens[:-1])
        want = pictures.wanted(model, served, complete)
        for position, rows in result.verified().items():
            assert (rows[-1] - want[position]).norm() <= EXACT * want[position].norm(), position


def _parts(prompt):
    """Back from tokens to what they were composed of."""
    parts, given = [], iter(prompt.pictures)
    for token in prompt.short:
        if token == pictures.IMAGE:
            parts.append(next(given))
        elif parts and isinstance(parts[-1], list):
            parts[-1].append(token)
        else:
            parts.append([token])
    return parts


def test_many_requests_with_and_without_pictures(engine, converted, reference):
    """At once, in steps that cut spans, with drafts: each as if it were alone."""
    served = engine("a", "bf16-good", speculative_config=DRAFTS, max_num_batched_tokens=48)
    model = reference(converted("a", "bf16-good"))
    shapes = [[(90, 130)], [], [(300, 420), (50, 37)], [(84, 84)] * 4, [], [(13, 1000)], [(1000, 13)]]
    asked = []
    for number, sizes in enumerate(shapes):
        parts = [text(20 + number, number)]
        for k, size in enumerate(sizes):
            parts += [picture(*size, seed=10 * number + k), text(number, 50 + k)]
        prompt = compose(served, parts)
        asked.append((parts, prompt, ask(served, prompt, 12)))
    served.finish()
    for parts, prompt, name in asked:
        result = served.results.pop(name)
        want = pictures.wanted(model, served, compose(served, parts, result.tokens[:-1]))
        picked = want[len(prompt.full) - 1 :].argmax(-1).tolist()
        assert result.tokens == picked
        rows = result.verified()
        assert set(rows) == set(range(len(prompt.full) + len(result.tokens) - 1))
        error = [(row - want[p]).norm() / want[p].norm() for p, computed in rows.items() for row in computed]
        assert torch.stack(error).max() <= EXACT


@pytest.mark.parametrize("weights", ["w8a8", "w8a8-quarot", "bf16-quarot"])
def test_conversions(engine, converted, reference, case, weights):
    """The tower stays BF16; in a rotated checkpoint the spans' embeddings are rotated, too."""
    prompt, wanted, _ = case(2)
    kind = "w8a8" if weights.startswith("w8a8") else "float32"
    _, options, grid, dtype, tolerance = GRIDS[kind]
    served = engine("a", weights, **options)
    name = ask(served, prompt)
    served.finish()
    found = served_logits(served, name)
    model = reference(converted("a", weights), grid, dtype)
    want = pictures.wanted(model, served, prompt)
    # of one request twice the tolerance of many, as in conftest.check
    assert distance(found, want).rms <= (2 * tolerance if kind == "w8a8" else 1e-4)
    assert distance(found, wanted["prefill_logits"]).rms < 0.25  # and it is the same model
    tower = served.runner.get_model().images
    assert {p.dtype for p in tower.vision.parameters()} == {dtype}
    linears = [module for module in tower.modules() if isinstance(module, LinearBase)]
    assert linears
    assert all(module.weight.numel() for module in linears)


def report(served):
    """What the startup report says of pictures."""
    return facts(served.inner.model_executor.driver_worker.worker, [])["images"]


def test_without_pictures(engine, converted, case):
    """--language-model-only: no tower, and a picture is refused."""
    with_tower = report(engine("a", "bf16"))
    served = engine("a", "bf16", language_model_only=True)
    assert served.runner.get_model().images is None
    without = report(served)
    stored = [f for f in inventory(open_checkpoint(converted("a", "bf16")).config) if kind_of(f.name) == "vision tower"]
    size = sum(math.prod(f.shape) for f in stored)
    assert with_tower == {"taken": True, "tower_bytes_of_a_rank": 4 * size}  # in float32, which only tests serve
    assert without == {"taken": False, "bytes_not_loaded": 2 * size}
    prompt, _, _ = case(1)
    with pytest.raises(ValueError, match="text-only"):
        ask(served, prompt)
