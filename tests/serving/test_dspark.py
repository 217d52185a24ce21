"""DSpark in vLLM's V1 runner: drafts equal the reference's, and drafting changes nothing but the speed."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from measures import rms

from serving.drafting import Drafter, accepted_lengths, dspark
from serving.ties import first_undecided
from vllm_ascend_dsv41.reference import Grid

LENGTHS = (1, 2, 3, 17, 127, 128, 129, 250, 300, 511, 600, 40, 64, 5, 90, 333)


def compare_drafts(model, results, exact=True):
    """Every recorded draft with the reference's behind the same tokens. Returns how many were compared."""
    compared, rounded = 0, []
    for result in results:
        sequence = result.prompt + result.tokens
        drafter = Drafter.over(model, sequence)
        undecided = first_undecided(model, sequence)[1]
        assert result.drafts
        for draft in result.drafts:
            if draft.position >= len(sequence):  # behind accepted tokens that the request did not ask for
                continue
            assert sequence[draft.position] == draft.anchor
            wanted = drafter.after(draft.anchor, draft.position)
            if not exact:  # tokens drafted before bias the others
                rounded.append((draft.logits[0], wanted.logits[0]))
                continue
            if draft.position > undecided:
                continue
            compared += 1
            assert draft.tokens == wanted.tokens.tolist(), (len(result.prompt), draft.position)
            assert rms(draft.logits, wanted.logits) <= 1e-5, draft.position
            assert torch.allclose(draft.confidence, wanted.confidence, rtol=1e-4, atol=1e-4), draft.position
    if not exact:
        found, want = (torch.stack(side) for side in zip(*rounded, strict=True))
        assert rms(found, want) <= 0.1, rms(found, want)
    return compared


@pytest.mark.parametrize(("preset", "length"), [("a", 5), ("a", 17), ("a", 130), ("a", 300), ("c", 17), ("c", 130)])
def test_golden_drafts(engine, golden, preset, length):
    """Every recorded step as a prompt of its own, its recorded next token forced: DeepSeek's own drafts."""
    case = golden(preset, f"text_{length:04d}.exact-fp32")
    served = engine(preset, "bf16", speculative_config=dspark())
    text = case["input_ids"].tolist() + case["decode_tokens"].tolist()
    names = [
        served.add(text[: length + step + 1], 1, allowed_token_ids=[anchor])
        for step, anchor in enumerate(case["spec_output_ids"][:, 0].tolist())
    ]
    served.finish()
    drafts = [served.results.pop(name).drafts[0] for name in names]
    found = torch.tensor([[draft.anchor, *draft.tokens] for draft in drafts])
    assert torch.equal(found, case["spec_output_ids"])
    confidence = torch.stack([draft.confidence for draft in drafts])
    assert torch.allclose(confidence, case["spec_confidence"], rtol=1e-4, atol=1e-4)
    for step, wanted in zip(case["spec_logits_steps"].tolist(), case["spec_logits"], strict=True):
        assert rms(drafts[step].logits, wanted) <= 1e-5


SHORT = [("a", "bf16-good", 77, 48)]
LONG = [("a", "bf16", 2048, 12), ("a", "bf16", 128, 200), ("a", "bf16-good", 128, 200), ("c", "bf16-good", 100, 60)]


@pytest.mark.parametrize(
    ("preset", "weights", "budget", "tokens"), SHORT + [pytest.param(*case, marks=pytest.mark.long) for case in LONG]
)
def test_every_draft_of_many_requests(engine, prompts, check, reference, converted, preset, weights, budget, tokens):
    """Sixteen interleaved requests, prefill beside verification; again behind prefix hits."""
    served = engine(preset, weights, max_num_batched_tokens=budget, speculative_config=dspark())
    lengths = [min(length, 1000 - tokens) for length in LENGTHS]
    asked = prompts(*lengths)
    first = served.run(asked, tokens)
    model = reference(converted(preset, weights))
    assert compare_drafts(model, first) > 16
    check(first, preset, weights=weights)
    again = served.run([prompt for prompt in asked if len(prompt) > 128], 12)
    assert all(result.cached == (len(result.prompt) - 1) // 128 * 128 for result in again)
    compare_drafts(model, again)
    check(again, preset, weights=weights)


@pytest.mark.long
def test_w8a8(engine, prompts, check, reference, converted):
    served = engine("a", "w8a8", dtype="bfloat16", max_num_batched_tokens=64, speculative_config=dspark())
    results = served.run(prompts(*LENGTHS, seed=22), 16)
    compare_drafts(reference(converted("a", "w8a8"), Grid.W8A8, torch.bfloat16), results, exact=False)
    check(results, "a", "w8a8")


@pytest.mark.parametrize("kind", ["bf16-quarot", "w8a8-quarot"])
def test_a_rotated_trunk(engine, prompts, reference, converted, kind):
    """The draft keeps the original basis: its own embedding, its own head, a projection that undoes the rotation."""
    grid = Grid.W8A8 if kind.startswith("w8a8") else Grid.EXACT
    served = engine("a", kind, speculative_config=dspark())
    results = served.run(prompts(17, 130, 300, seed=23), 12)
    compare_drafts(reference(converted("a", kind), grid), results, exact=grid is Grid.EXACT)


@pytest.mark.parametrize("tokens", [5, 10])
def test_a_good_draft_is_accepted(engine, prompts, reference, converted, tokens):
    """As often as the reference predicts, at every length, in fewer steps."""
    options = dspark(num_speculative_tokens=tokens)
    served = engine("a", "bf16-good", speculative_config=options, disable_log_stats=False)
    asked = prompts(*range(117, 133), seed=24)
    results = served.run(asked, 150)
    model = reference(converted("a", "bf16-good"))
    if tokens == model.config.dspark_block_size:
        lengths = []
        for result in results:
            text = result.prompt + result.tokens
            drafter = Drafter.over(model, text)
            wanted = accepted_lengths(drafter, text, len(result.prompt), tokens)
            positions = [draft.position for draft in result.drafts if draft.position < len(text)]
            found = [b - a - 1 for a, b in pairwise(positions)]
            assert found == wanted[: len(found)]
            lengths += found
        assert set(lengths) == set(range(tokens + 1))
        assert sum(lengths) / len(lengths) > 0.6 * tokens
    steps = sum(len(result.drafts) for result in results)
    assert sum(len(result.tokens) for result in results) > 2.5 * steps


PLAIN = {"a": (1, 2, 5, 17, 40, 130, 300), "c": (17, 40, 130)}


@pytest.mark.parametrize(
    ("preset", "weights", "count"),
    [
        ("a", "bf16-good", 24),
        pytest.param("a", "bf16-useless", 24, marks=pytest.mark.long),
        pytest.param("a", "bf16", 200, marks=pytest.mark.long),
    ],
)
def test_greedy_tokens_are_the_same(engine, golden, prompts, reference, converted, preset, weights, count):
    """With and without DSpark, for the golden prompts and random ones."""
    golden_prompts = [golden(preset, f"text_{n:04d}.exact-fp32")["input_ids"].tolist() for n in PLAIN[preset]]
    asked = golden_prompts + prompts(*(1 + 37 * i % 400 for i in range(count)), seed=25)
    plain = engine(preset, weights, max_num_batched_tokens=512).run(asked, 32)
    served = engine(preset, weights, max_num_batched_tokens=512, speculative_config=dspark())
    drafted = served.run(asked, 32)
    model = reference(converted(preset, weights))
    for a, b in zip(plain, drafted, strict=True):
        if a.tokens == b.tokens:
            continue
        same = next(i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y)
        text = a.prompt + a.tokens[:same]
        logits, undecided = first_undecided(model, text)
        top = logits[-1].topk(2).values
        assert undecided < len(text) or top[0] - top[1] < 1e-4, (len(a.prompt), same)
    assert sum(a.tokens == b.tokens for a, b in zip(plain, drafted, strict=True)) >= 0.97 * len(asked)
    if weights == "bf16-useless":
        assert all(len(result.drafts) == 32 for result in drafted)
