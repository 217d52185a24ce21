"""Whatever else happens in the server, a request's logits stay the same: hidden state errors show here."""

from __future__ import annotations

import pytest

from serving.conftest import GRIDS

LENGTHS = (1, 2, 3, 17, 127, 128, 129, 250, 300, 511, 600, 40, 64, 5, 90, 333)
GROWING = (120, 121, 122, 123, 124, 125, 126, 127, 250, 251, 252, 253, 300, 119, 118, 117)  # all need more blocks soon

SHORT = [("a", "float32", 16), ("a", "float32", 77), ("a", "float32", 2048)]
SHORT += [("c", "float32", 77), ("a", "w8a8", 64)]
LONG = [(p, g, b) for p, g in (("c", "float32"), ("a", "w8a8"), ("c", "w8a8")) for b in (16, 77)]


@pytest.mark.parametrize(
    ("preset", "grid", "budget"),
    SHORT + [pytest.param(*case, marks=pytest.mark.long) for case in LONG if case not in SHORT],
)
def test_token_budgets_and_prefix_hits(engine, prompts, check, preset, grid, budget):
    """Sixteen requests of mixed length at once; again with full prefix hits; then sharing a part."""
    weights, options, *_ = GRIDS[grid]
    served = engine(preset, weights, max_num_batched_tokens=budget, **options)
    asked = prompts(*LENGTHS)
    first = served.run(asked, 6)
    check(first, preset, grid)
    assert all(result.cached == 0 for result in first)
    again = served.run([prompt for prompt in asked if len(prompt) > 128], 4)
    check(again, preset, grid)
    assert all(result.cached == (len(result.prompt) - 1) // 128 * 128 for result in again)
    shared = [[*prompt[:n], 7, 9, 11] for prompt in asked for n in (130, 256, 400) if len(prompt) > n + 3]
    partial = served.run(shared, 4)
    check(partial, preset, grid)
    assert {result.cached for result in partial} == {128, 256, 384}


@pytest.mark.parametrize("grid", ["bfloat16"])
def test_bf16(engine, prompts, check, grid):
    weights, options, *_ = GRIDS[grid]
    served = engine("a", weights, max_num_batched_tokens=64, **options)
    check(served.run(prompts(*LENGTHS), 6), grid=grid)
    check(served.run([prompt for prompt in prompts(*LENGTHS) if len(prompt) > 128], 4), grid=grid)


@pytest.mark.parametrize("concurrent", [1, 2, 5, 16])
def test_concurrency(engine, prompts, check, concurrent):
    """Alone or with others, prefill beside decode: requests arrive while others are being decoded."""
    served = engine("a", "bf16")
    asked = prompts(*(LENGTHS[:concurrent]), seed=3)
    names = []
    for prompt in asked:
        names.append(served.add(prompt, 12))
        served.step()
    served.finish()
    check([served.results.pop(name) for name in names])


@pytest.mark.parametrize("preset", ["a", "c"])
def test_preemption(engine, prompts, check, preset):
    """A pool too small for everybody: requests lose their blocks and start over."""
    served = engine(preset, "bf16", max_num_batched_tokens=64, num_gpu_blocks_override=60)
    results = served.run(prompts(*GROWING), 24)
    assert max(len(rows) for result in results for rows in result.logits.values()) > 1, "nothing was preempted"
    check(results, preset)


def test_preemption_w8a8(engine, prompts, check):
    served = engine("a", "w8a8", dtype="bfloat16", max_num_batched_tokens=64, num_gpu_blocks_override=60)
    results = served.run(prompts(*GROWING), 16)
    assert max(len(rows) for result in results for rows in result.logits.values()) > 1, "nothing was preempted"
    check(results, grid="w8a8")


def test_abort_in_the_middle(engine, prompts, check):
    """Aborted while prefilling and while decoding; their blocks go to others at once."""
    served = engine("a", "bf16", max_num_batched_tokens=64, num_gpu_blocks_override=60)
    asked = prompts(600, 40, 300, 90, 17, seed=5)
    names = [served.add(prompt, 40) for prompt in asked]
    for _ in range(4):
        served.step()
    served.core.abort_request([names[0]])
    for _ in range(6):
        served.step()
    served.core.abort_request([names[1]])
    names += [served.add(prompt, 10) for prompt in prompts(250, 129, 33, seed=6)]
    served.finish()
    results = [served.results.pop(name) for name in names]
    assert len(results[0].tokens) < 40
    assert len(results[1].tokens) < 40
    for result in results[:2]:  # what they got before is right, too
        result.logits = {
            p: rows for p, rows in result.logits.items() if p < len(result.prompt) + len(result.tokens) - 1
        }
    check([result for result in results if result.logits])


@pytest.mark.parametrize("sizes", [(1,), (1, 2), (3,), (5, 1, 1, 2), (127, 2), (128,)])
def test_steps_that_leave_a_group_incomplete(engine, prompts, check, sizes):
    """A ratio-2 index source scores against its own keys also when its newest group is half full."""
    served = engine("a", "bf16")
    prompt = prompts(261, seed=9)[0]
    name, step = served.add(prompt, 3), 0
    while served.core.has_unfinished_requests():
        served.budget(sizes[step % len(sizes)])
        served.step()
        step += 1
    check([served.results.pop(name)])


def test_the_same_prompt_twice_in_one_step(engine, prompts, check):
    """The second may read blocks that the first fills in that very step."""
    served = engine("a", "bf16")
    prompt = prompts(300, seed=11)[0]
    results = served.run([prompt, prompt, prompt[:200]], 4)
    check(results)
    assert results[0].tokens == results[1].tokens


def test_a_seeded_prompt_in_several_steps(engine, prompts, check):
    """Its generator advances only when a token is used: the same tokens as in one step, and no crash."""
    served = engine("a", "bf16")
    prompt = prompts(200, seed=17)[0]
    options = {"temperature": 1.0, "seed": 3}
    whole = served.run([prompt], 8, **options)[0]
    served.forget()
    served.budget(16)
    names = [served.add(prompt, 8, **options), served.add(prompts(40, seed=18)[0], 8, **options)]
    served.finish()
    results = [served.results.pop(name) for name in names]
    assert results[0].tokens == whole.tokens
    check(results)


def test_sampling_does_not_disturb_others(engine, prompts, check):
    """Random sampling, penalties and a seed beside greedy requests."""
    served = engine("a", "bf16")
    asked = prompts(17, 130, 64, seed=13)
    names = [
        served.add(asked[0], 12),
        served.add(asked[1], 12, temperature=1.0, top_p=0.95, seed=7),
        served.add(asked[2], 12, temperature=0.7, repetition_penalty=1.2),
    ]
    served.finish()
    results = [served.results.pop(name) for name in names]
    check(results)
    again = served.run([asked[1]], 12, temperature=1.0, top_p=0.95, seed=7)[0]
    assert again.tokens == results[1].tokens
