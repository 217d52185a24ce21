"""What requests may ask for besides greedy text: the same with drafts as without."""

from __future__ import annotations

import math

import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from serving.drafting import dspark
from vllm_ascend_dsv41.spec_decode.verification import Drafted

GROWING = (120, 121, 122, 123, 124, 125, 126, 127, 250, 251, 252, 253, 300, 119, 118, 117)  # all need more blocks soon

REQUESTS = {
    "greedy": {},
    "repetition": {"repetition_penalty": 1.3},
    "presence and frequency": {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    "bad words": {"bad_words": ["a", "the"]},
    "allowed": {"allowed_token_ids": list(range(30, 90))},
    "at least": {"min_tokens": 20, "stop_token_ids": list(range(3, 200))},
    "stop": {"stop_token_ids": list(range(3, 60))},
    "logprobs": {"logprobs": 4},
    "penalty and logprobs": {"repetition_penalty": 1.2, "logprobs": 2},
    "structure": {"structured_outputs": StructuredOutputsParams(regex="[0-9]{3}-[0-9]{30}")},
    "choice": {"structured_outputs": StructuredOutputsParams(choice=["yes", "no", "perhaps"])},
    "top-k of one": {"temperature": 0.8, "top_k": 1},
    "top-p of one": {"temperature": 1e-3, "top_p": 0.5},
}


def run(served, asked):
    names = [served.add(prompt, 32, **options) for prompt, options in zip(asked, REQUESTS.values(), strict=True)]
    served.finish()
    return dict(zip(REQUESTS, (served.results.pop(name) for name in names), strict=True))


@pytest.mark.parametrize("method", [{}, {"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}])
def test_options_of_requests(engine, prompts, method):
    """All in one batch, with drafts that are often accepted; without randomness in the result."""
    asked = prompts(*range(20, 20 + len(REQUESTS)), seed=31)
    plain = run(engine("a", "bf16-good", max_num_batched_tokens=512), asked)
    drafted = run(engine("a", "bf16-good", max_num_batched_tokens=512, speculative_config=dspark(**method)), asked)
    for name, wanted in plain.items():
        found = drafted[name]
        assert found.tokens == wanted.tokens, name
        if wanted.logprobs is None:
            assert found.logprobs is None
            continue
        for a, b in zip(found.logprobs, wanted.logprobs, strict=True):
            assert a.keys() == b.keys(), name
            assert all(math.isclose(a[token].logprob, b[token].logprob, abs_tol=2e-3) for token in a), name
            assert {t: p.rank for t, p in a.items()} == {t: p.rank for t, p in b.items()}
    assert sum(len(result.tokens) for result in drafted.values()) > 1.5 * sum(len(r.drafts) for r in drafted.values())


@pytest.mark.parametrize("options", [{"min_p": 0.1}, {"logit_bias": {7: 3.0}}])
def test_options_that_vllm_refuses(engine, prompts, options):
    """Its V1 runner would ignore them where drafts are verified."""
    served = engine("a", "bf16-good", speculative_config=dspark())
    with pytest.raises(VLLMValidationError, match="not yet supported with speculative decoding"):
        served.add(prompts(9)[0], 4, temperature=1.0, **options)


def test_seeds(engine, prompts):
    """A request's random numbers are its own: the same text alone and beside others, drafted and verified at random."""
    method = {"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}
    served = engine("a", "bf16-soft", speculative_config=dspark(**method))
    asked = prompts(40, 130, 17, 64, seed=32)
    options = {"temperature": 1.0, "seed": 9}
    alone = served.run([asked[1]], 40, **options)[0]
    names = [served.add(asked[0], 40), served.add(asked[1], 40, **options), served.add(asked[2], 40, temperature=0.5)]
    served.finish()
    assert [served.results.pop(name) for name in names][1].tokens == alone.tokens
    served.budget(16)  # the prompt in several steps: numbers drawn for unfinished prompts are put back
    assert served.run([asked[1]], 40, **options)[0].tokens == alone.tokens
    served.budget(2048)
    assert served.run([asked[1]], 40, temperature=1.0, seed=10)[0].tokens != alone.tokens


PROBABILISTIC = dspark(draft_sample_method="probabilistic")


@pytest.mark.parametrize("method", [dspark(), PROBABILISTIC, dspark(rejection_sample_method="block")])
@pytest.mark.parametrize("length", [1, 129])
def test_a_request_that_joins_with_one_token(engine, prompts, method, length):
    """The scheduler pads it with placeholders: they are no draft, whatever they are compared with, and a seed's
    numbers are not spent on them."""
    served = engine("a", "bf16-soft", speculative_config=method)
    others, prompt = prompts(40, 50, 60, seed=36), prompts(length, seed=37)[0]
    options = {"temperature": 1.0, "seed": 4}
    cold = served.run([prompt], 24, **options)[0]
    names = [served.add(other, 60, temperature=t) for other, t in zip(others, (1.0, 0.0, 0.7), strict=True)]
    served.step()
    names += [served.add(prompt, 24, **options), served.add(prompt, 24, **options), served.add(prompt, 24)]
    served.finish()
    _, _, _, first, second, greedy = (served.results.pop(name) for name in names)
    assert first.cached == second.cached == (length - 1) // 128 * 128
    assert first.tokens == second.tokens == cold.tokens
    assert greedy.tokens == served.run([prompt], 24)[0].tokens


def test_greedy_and_sampled_requests_take_turns(engine, prompts):
    """A greedy request has no distribution kept, a sampled one has one until its draft is verified."""
    served = engine("a", "bf16-good", speculative_config=PROBABILISTIC)
    asked = prompts(20, 30, 40, 50, seed=38)
    names = [served.add(asked[0], 6, temperature=1.0), served.add(asked[1], 60)]
    while served.core.get_num_unfinished_requests() > 1:
        served.step()
    names.append(served.add(asked[2], 20))
    for _ in range(2):
        served.step()
    assert not served.runner._kept
    names.append(served.add(asked[3], 20, temperature=1.0))
    for _ in range(2):
        served.step()
    assert len(served.runner._kept) == 1
    served.finish()
    plain = engine("a", "bf16-good").run([asked[1]], 60)[0]
    assert served.results.pop(names[1]).tokens == plain.tokens
    assert [len(served.results.pop(names[i]).tokens) for i in (0, 2, 3)] == [6, 20, 20]


def test_preempted_while_sampling(engine, prompts):
    options = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 60, "speculative_config": PROBABILISTIC}
    served = engine("a", "bf16-soft", **options)
    results = served.run(prompts(*GROWING), 40, temperature=1.0)
    assert all(len(result.tokens) == 40 for result in results)
    assert any(len(rows) > 1 for result in results for p, rows in result.verified().items() if p < 100)


def test_log_probabilities_of_given_tokens(engine, prompts):
    """Exist for one position of a request: drafts wait, also those of others in the batch."""
    asked = prompts(20, 30, seed=39)

    def run(served):
        names = [served.add(asked[0], 24, logprob_token_ids=[7, 9, 300]), served.add(asked[1], 24, logprobs=2)]
        served.finish()
        return [served.results.pop(name) for name in names]

    plain = run(engine("a", "bf16-good"))
    drafted = run(engine("a", "bf16-good", speculative_config=dspark()))
    for found, wanted in zip(drafted, plain, strict=True):
        assert found.tokens == wanted.tokens
        for a, b in zip(found.logprobs, wanted.logprobs, strict=True):
            assert a.keys() == b.keys()
            assert all(math.isclose(a[token].logprob, b[token].logprob, abs_tol=2e-3) for token in a)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_synthetic_acceptance(engine, prompts, temperature):
    """Random weights agree on nothing, yet drafts are accepted at the asked rate."""
    method = dspark(rejection_sample_method="synthetic", synthetic_acceptance_length=3.5)
    results = engine("a", "bf16", speculative_config=method).run(
        prompts(*range(20, 36), seed=35), 120, temperature=temperature
    )
    steps, tokens = (sum(len(getattr(r, name)) for r in results) for name in ("drafts", "tokens"))
    assert 3.3 < tokens / steps < 3.6  # the last block of a request is cut


def test_the_longest_sequence(engine, prompts):
    """Drafts at the end of the longest sequence are cut, not written beyond it."""
    asked = prompts(1000, 1018, 1023, seed=33)
    plain = engine("a", "bf16-good").run(asked, 100)
    drafted = engine("a", "bf16-good", speculative_config=dspark()).run(asked, 100)
    assert [len(result.prompt) + len(result.tokens) for result in drafted] == [1024] * 3
    assert [result.tokens for result in drafted] == [result.tokens for result in plain]


def test_preemption(engine, prompts, check):
    """A pool too small for everybody: requests lose their blocks and their drafts, and start over."""
    options = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 60, "speculative_config": dspark()}
    served = engine("a", "bf16-good", **options)
    results = served.run(prompts(*GROWING), 40)
    recomputed = [p for result in results for p, rows in result.verified().items() if len(rows) > 1 and p < 100]
    assert recomputed, "nothing was preempted"
    check(results, weights="bf16-good")


def test_abort_in_the_middle(engine, prompts, check):
    """Aborted while prefilling and while drafts wait; their blocks go to others at once."""
    served = engine("a", "bf16-good", max_num_batched_tokens=64, speculative_config=dspark())
    names = [served.add(prompt, 60) for prompt in prompts(600, 40, 300, 90, 17, seed=5)]
    for _ in range(4):
        served.step()
    served.core.abort_request([names[0]])
    for _ in range(6):
        served.step()
    served.core.abort_request([names[1]])
    names += [served.add(prompt, 20) for prompt in prompts(250, 129, 33, seed=6)]
    served.finish()
    check([result for name in names if (result := served.results.pop(name)).verified()], weights="bf16-good")


# ---- sampling: every generated token against the distribution that the target gave for it --------------------------

TOKENS, REQUESTS_SAMPLED = 320, 64
METHODS = {  # tokens that a step may have: with 192 some drafts wait for a step or two
    "without drafts": (None, 512),
    "standard": (dspark(draft_sample_method="probabilistic"), 192),
    "block": (dspark(draft_sample_method="probabilistic", rejection_sample_method="block"), 512),
}


def deviation(results, buckets=7):
    """Largest deviation, in standard deviations, of the count of any group of tokens from what the target's
    distributions add up to. Groups: by rank and by remainder of the id."""
    counts, expected, variance, samples = 0, 0, 0, 0
    for result in results:
        first = len(result.prompt) - 1
        logits = result.matrix(range(first, first + len(result.tokens)))
        p = logits.double().softmax(1)
        rank = p.argsort(1, descending=True).argsort(1)
        remainder = torch.arange(p.shape[1]) % buckets
        groups = [rank == 0, (rank > 0) & (rank < 8), (rank >= 8) & (rank < 64), rank >= 64]
        groups += [(remainder == b).expand_as(rank) for b in range(buckets)]
        chosen = torch.tensor(result.tokens)[:, None]
        inside = torch.stack([group.gather(1, chosen)[:, 0] for group in groups]).double()
        mass = torch.stack([(p * group).sum(1) for group in groups])
        counts, expected = counts + inside.sum(1), expected + mass.sum(1)
        variance, samples = variance + (mass * (1 - mass)).sum(1), samples + len(result.tokens)
    assert samples >= 20_000
    return float(((counts - expected) / variance.sqrt()).abs().max())


def sample(engine, prompts, method):
    """20,480 tokens."""
    speculation, budget = METHODS[method]
    options = {} if speculation is None else {"speculative_config": speculation}
    served = engine("a", "bf16-soft", max_num_seqs=REQUESTS_SAMPLED, max_num_batched_tokens=budget, **options)
    torch.manual_seed(41)
    results = served.run(prompts(*[5] * REQUESTS_SAMPLED, seed=34), TOKENS, temperature=1.0)
    for result in results:
        result.logits = result.verified()
    return results


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_sampled_tokens_are_the_targets(engine, prompts, method):
    results = sample(engine, prompts, method)
    assert deviation(results) < 4.5
    if METHODS[method][0] is not None:
        drafts = sum(len(result.drafts) for result in results)
        assert sum(len(result.tokens) for result in results) > 1.3 * drafts


@pytest.mark.long
def test_a_biased_sampler_is_noticed(engine, prompts, monkeypatch):
    """The test above can fail: drafts taken for the draft's only choice, though they were drawn."""
    monkeypatch.setattr(Drafted, "own_probability", lambda self: torch.ones(self.rows.shape))
    assert deviation(sample(engine, prompts, "standard")) > 6
